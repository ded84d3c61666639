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


def references(saved: Tensor, heads: int, tokens: int, documents: int) -> Tensor:
    """The part of what a forward pass saved that holds m, as float32. m and then l lie at its end: src/kernels/cpu/memory.cpp,
    src/kernels/cuda/backend/memory.cpp."""
    if saved.is_cuda:
        slots = -(-(tokens + min(documents, tokens) * 15 + 256) // 128) * 128  # src/kernels/cuda/sm90/layout.hpp: slot_capacity
        size = -(-heads * slots * 4 // 256) * 256
    else:
        size = -(-heads * tokens * 4 // 64) * 64
    return saved[saved.numel() - 2 * size:saved.numel() - size].view(torch.float32)


class _BrokenReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, recipe: str) -> Tensor:
        ctx.options = (recipe, True, -1, -1, scale, torch.are_deterministic_algorithms_enabled())
        out, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu_seqlens, *ctx.options, True)
        m = references(saved, q.shape[1], q.shape[0], len(cu_seqlens) - 1)
        m.ceil_()
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
