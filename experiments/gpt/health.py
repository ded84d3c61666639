# SPDX-License-Identifier: Apache-2.0
"""What attention's numbers do inside a model: one held-out row, forward and backward, in its first and last layer.

Written at every evaluation, so that health.csv follows training. Shares of zeros and lost mass are flamia.stats of the layer's true
operands; where the emulation knows the recipe, it counts dS (deliberate mistakes included) and adds the error of the rounded dS. The
cosines compare one step's output and gradients with exact attention on the same operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

import attention as attentions
import emulation
from data import Packed, gather
from model import GPT, loss
from tap import Tap

COLUMNS = ["step", "layer", "recipe", "cos_out", "cos_dq", "cos_dk", "cos_dv", "norm_dq", "q_zeros", "k_zeros", "v_zeros", "d_out_zeros",
           "p_zeros", "ds_zeros_dq", "ds_zeros_dk", "ds_lost_dq", "ds_lost_dk", "ds_error_dq", "ds_error_dk"]


def _pass(attention: attentions.Attention, operands: tuple[Tensor, ...], d_out: Tensor, cu_seqlens: Tensor, scale: float) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    o = attention(*leaves, cu_seqlens, scale)
    return [o.detach(), *torch.autograd.grad(o, leaves, d_out)]


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def _shares(argument: str, operands: tuple[Tensor, ...], d_out: Tensor, cu_seqlens: Tensor, scale: float) -> dict[str, float]:
    import flamia
    recipe = argument.partition("+")[0]
    s = flamia.stats(*operands, cu_seqlens, d_out, scale=scale, recipe=recipe)
    assert s.d_out is not None and s.ds_zeros is not None and s.ds_lost is not None
    found = {"q_zeros": s.q.zeros, "k_zeros": s.k.zeros, "v_zeros": s.v.zeros, "d_out_zeros": s.d_out.zeros, "p_zeros": s.p_zeros,
            "ds_zeros_dq": s.ds_zeros[0], "ds_zeros_dk": s.ds_zeros[1], "ds_lost_dq": s.ds_lost[0], "ds_lost_dk": s.ds_lost[1]}
    try:
        return found | emulation.ds_shares(argument, *operands, cu_seqlens, d_out, scale)
    except NotImplementedError:  # a recipe that the emulation does not have
        return found


def measure(model: GPT, held_out: Packed, stream: Tensor, name: str, own: attentions.Attention,
            autocast: torch.autocast) -> list[dict[str, float | int | str]]:
    """A line of health.csv (without the step) for the first and the last layer. `name`: of the attention, "flamia:mxfp8"."""
    base, _, argument = name.partition(":")
    if base not in ("flamia", "emulated"):
        argument = ""
    offsets = torch.from_numpy(held_out.row_offsets(0)[:1])
    cu_seqlens = torch.from_numpy(held_out.boundaries(offsets.numpy())).to(stream.device)
    batch = gather(stream, offsets.to(stream.device), cu_seqlens, held_out.row)
    tap = Tap(own)
    with autocast:
        value = loss(model, batch.tokens, batch.targets, batch.positions, cu_seqlens, tap)
    gradients = torch.autograd.grad(value, [call.o for call in tap.calls])
    exact, lines = attentions.make("exact", held_out.row), []
    for layer in sorted({0, len(tap.calls) - 1}):
        call, d_out = tap.calls[layer], gradients[layer]
        operands = (call.q.detach(), call.k.detach(), call.v.detach())
        got, wanted = (_pass(a, operands, d_out, call.cu_seqlens, call.scale) for a in (own, exact))
        cosines = {f"cos_{what}": _cosine(a, b) for what, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)}
        shares = _shares(argument, operands, d_out, call.cu_seqlens, call.scale) if argument else {}
        lines.append({"layer": layer, "recipe": argument.partition("+")[0], **cosines, "norm_dq": float(got[1].float().norm()), **shares})
    return lines
