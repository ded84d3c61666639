# SPDX-License-Identifier: Apache-2.0
"""`--attention flamia:<recipe>`: this project's attention, for example flamia:mxfp8 or "flamia:mxfp8-exact ds=row32".

A deliberate mistake can follow, as in the emulation:
    flamia:mxfp8+backward_reference=integer      the backward pass recomputes P from the nearest whole row reference above the forward's
    flamia:mxfp8+backward_exp2=schraudolph, +gradient_p=codes, +ds=constant8, 12 or 16
                                                 on a GPU, with a library that mistakes.patch was applied to; one mistake in a process
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from registry import Attention, register

BROKEN_REFERENCE = "backward_reference=integer"
IN_KERNELS = {"backward_exp2=schraudolph": "exp2", "gradient_p=codes": "codes"} | {f"ds=constant{n}": f"constant={2 ** n}" for n in (8, 12, 16)}


def references(saved: Tensor, lse: Tensor, documents: int) -> Tensor:
    """The part of what a forward pass saved that holds m, as float32, [heads, slots]; l follows it. On the CPU they lie at the end
    (src/kernels/cpu/memory.cpp); on a GPU (src/kernels/cuda/backend/memory.cpp) they are found by lse = ln 2 (m + log2 l) of every head's first token."""
    heads, tokens = lse.shape
    if not saved.is_cuda:
        size = -(-heads * tokens * 4 // 64) * 64
        return saved[saved.numel() - 2 * size:saved.numel() - size].view(torch.float32)
    slots = -(-(tokens + min(documents, tokens) * 15 + 256) // 128) * 128  # src/kernels/cuda/sm90/layout.hpp: slot_capacity
    at = _place(saved, lse, slots)
    return saved[at:at + heads * slots * 4].view(torch.float32)


_places: dict[tuple[int, int, int], int] = {}


def _place(saved: Tensor, lse: Tensor, slots: int) -> int:
    """Byte at which m starts: a multiple of 256. The same for all calls of one shape."""
    heads = lse.shape[0]
    if (key := (saved.numel(), heads, slots)) not in _places:
        numbers, apart = saved.view(torch.float32), -(-heads * slots // 64) * 64
        count = (numbers.numel() - apart - heads * slots) // 64 + 1
        fits = torch.ones(count, dtype=torch.bool, device=saved.device)
        for head in range(heads):
            m, l = (numbers[start::64][:count].double() for start in (head * slots, apart + head * slots))  # noqa: E741
            fits &= ((m + torch.log2(l)) * 0.6931471805599453 - lse[head, 0]).abs() < 1e-4
        found = fits.nonzero().flatten().tolist()
        if not found:
            raise RuntimeError("m of the forward pass was found nowhere; give a row whose first document is not empty")
        _places[key] = 256 * found[-1]  # codes lie before it, and where they have no token the memory may hold an older pass
    return _places[key]


class _BrokenReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, recipe: str) -> Tensor:
        ctx.options = (recipe, True, -1, -1, scale, torch.are_deterministic_algorithms_enabled())
        out, lse, saved = torch.ops.flamia.attn_forward(q, k, v, cu_seqlens, *ctx.options, True)
        references(saved, lse, len(cu_seqlens) - 1).ceil_()
        ctx.save_for_backward(out, cu_seqlens, saved)
        ctx.key_heads = k.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        out, cu_seqlens, saved = ctx.saved_tensors
        return (*torch.ops.flamia.attn_backward(d_out, out, cu_seqlens, saved, ctx.key_heads, *ctx.options), None, None, None)


def _ask_for(mistake: str) -> None:
    """The kernels read it once, at their first launch."""
    from flamia._library import lib
    if not hasattr(lib, "flamia_makes_mistakes"):
        raise RuntimeError("this mistake needs a library of its own: apply experiments/gpt/mistakes.patch to a copy of src, build it with "
                           "FLAMIA_CUDA=ON and let FLAMIA_LIBRARY name it")
    if os.environ.setdefault("FLAMIA_MISTAKE", mistake) != mistake:
        raise RuntimeError(f"this process makes the mistake {os.environ['FLAMIA_MISTAKE']} already; start another for {mistake}")


@register("flamia")
def _flamia(argument: str, row: int) -> Attention:
    """Every recipe that trains, on the device of its input; an error where that device does not do it."""
    name, _, mistake = argument.partition("+")
    if not name:
        raise ValueError("attention 'flamia' needs a recipe, for example --attention flamia:mxfp8")
    if mistake not in ("", BROKEN_REFERENCE, *IN_KERNELS):
        raise ValueError(f"attention 'flamia' has no option {mistake}; it has {', '.join((BROKEN_REFERENCE, *IN_KERNELS))}")
    try:
        import flamia
    except ImportError as error:
        raise RuntimeError(f"attention 'flamia' needs the flamia package, pip install . in the checkout ({error})") from error
    recipe = flamia.Recipe(name).name  # a wrong name fails now, not in the first step
    if mistake in IN_KERNELS:
        _ask_for(IN_KERNELS[mistake])

    @torch.compiler.disable
    def broken(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        return _BrokenReference.apply(q, k, v, cu_seqlens, scale, recipe)

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        return flamia.attention(q, k, v, cu_seqlens, scale=scale, recipe=recipe)
    return broken if mistake == BROKEN_REFERENCE else attention
