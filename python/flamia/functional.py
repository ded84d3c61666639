# SPDX-License-Identifier: Apache-2.0
"""flamia.attention."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops  # noqa: F401 -- defines torch.ops.flamia
from .recipe import Recipe


class _LseWithoutGradient(torch.autograd.Function):
    """lse as it is; a loss that needs its gradient fails instead of training without it."""

    @staticmethod
    def forward(ctx: Any, lse: Tensor, out: Tensor) -> Tensor:
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        raise RuntimeError("the lse that flamia.attention returns has no gradient; use lse.detach() if the loss only reports it, and "
                           "another attention if the loss depends on it")


def _window(window: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window = {window!r} but must be two integers (left, right), -1 for unlimited") from None
    for value in (left, right):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or not -1 <= value < 2**63:
            raise ValueError(f"window = {window!r} but both must be integers: -1 for unlimited, or how many tokens to the left and "
                             "right a query sees")
    return int(left), int(right)


def _scale(scale: float | None) -> float:
    """For the op: 0 is the default."""
    if scale is None:
        return 0.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"scale is a {type(scale).__name__} but must be a number, or None for 1 / sqrt(head_dim)")
    if not 2.0**-100 <= scale <= 2.0**100:  # what the library takes; smaller ones would round to its 0, the default
        raise ValueError(f"scale = {scale} but must be a positive number from 2^-100 to 2^100, or None for 1 / sqrt(head_dim)")
    return scale


def _refuse_transforms(*tensors: Tensor) -> None:
    """torch.func and forward-mode derivatives: nothing implements them, and forward mode would silently lose the tangent."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("flamia attention does not work under torch.func transforms (grad, vmap, jvp, ...); call it outside "
                                  "of them, use torch.autograd.grad for gradients, and pack a batch along the token axis instead of vmap")
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flamia attention has no forward-mode derivative; use reverse mode (backward, torch.autograd.grad)")


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, causal: bool = True,
              window: tuple[int, int] = (-1, -1), scale: float | None = None, recipe: str | Recipe = "mxfp8",
              return_lse: Literal[False] = False) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, causal: bool = True,
              window: tuple[int, int] = (-1, -1), scale: float | None = None, recipe: str | Recipe = "mxfp8",
              return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, causal: bool = True,
              window: tuple[int, int] = (-1, -1), scale: float | None = None, recipe: str | Recipe = "mxfp8",
              return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with low-precision operands, forward and backward.

    q           [tokens, query_heads, head_dim] or [batch, tokens, query_heads, head_dim], bfloat16, float16 or float32
    k, v        the same with key_heads, which divides query_heads; dtype and device of q
    cu_seqlens  int32 [documents + 1] on the device of q, for packed documents: document i is tokens cu_seqlens[i] up to
                cu_seqlens[i + 1]. Empty documents are allowed; tokens after the last one get zero output and gradient. On a GPU the
                values are never read on the host. None: one document, or with a batch axis one for each of its entries
    causal      a query sees no later key
    window      (left, right): a query at i sees the keys i - left ... i + right of its document; -1 = unlimited
    scale       of the scores; None = 1 / sqrt(head_dim)
    recipe      the numbers to compute with: a name such as "mxfp8" or "mxfp8-exact ds=row32", JSON, or a flamia.Recipe
    return_lse  also return the log-sum-exp of the scores

    Returns out in the shape and dtype of q (under autocast: bfloat16), or (out, lse) with lse float32 [query_heads, tokens] or
    [batch, query_heads, tokens]: the natural logarithm, +inf for a row that sees no key. lse has no gradient.

    Views with contiguous channels are taken as they are; a batch whose entries do not lie behind each other is copied.
    torch.use_deterministic_algorithms(True) makes the gradient of q bit-repeatable on a GPU too (it always is on the CPU).

    Raises TypeError (dtypes, types), ValueError (shapes, devices, strides, values) and NotImplementedError (what the recipe or the
    device does not do). No argument is ever ignored.
    """
    out, lse = attend(q, k, v, cu_seqlens, causal=causal, window=window, scale=scale, recipe=recipe, deterministic=False)
    if not return_lse:
        return out
    if out.requires_grad and not torch.compiler.is_compiling():
        lse = _LseWithoutGradient.apply(lse, out)
    return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *, causal: bool, window: tuple[int, int],
           scale: float | None, recipe: str | Recipe, deterministic: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of `attention`. deterministic: as torch.use_deterministic_algorithms, for this call."""
    for name, x in (("q", q), ("k", k), ("v", v), ("cu_seqlens", cu_seqlens)):
        if not isinstance(x, Tensor) and not (name == "cu_seqlens" and x is None):
            raise TypeError(f"{name} is a {type(x).__name__} but must be a torch.Tensor")
        if x is not None and x.layout != torch.strided:
            raise TypeError(f"{name} has the layout {x.layout} but must be dense; of nested tensors pass values() and offsets().int()")
    if not isinstance(recipe, (str, Recipe)):
        raise TypeError(f"recipe is a {type(recipe).__name__} but must be a name such as \"mxfp8\" or a flamia.Recipe")
    if not isinstance(causal, (bool, torch.SymBool)):  # None would be False: every token would see the later ones
        raise TypeError(f"causal is a {type(causal).__name__} but must be True or False")
    _refuse_transforms(q, k, v)
    shape = q.shape
    if len(shape) == 4:
        if k.dim() != 4 or v.dim() != 4:
            raise ValueError(f"q has four axes [batch, tokens, heads, head_dim], but k {k.dim()} and v {v.dim()}; give all a batch")
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens goes with packed q, k, v of shape [tokens, heads, head_dim], but q has a batch axis; drop one")
        if k.shape[:2] != shape[:2] or v.shape[:2] != shape[:2]:
            raise ValueError(f"q, k and v have shapes {tuple(shape)}, {tuple(k.shape)} and {tuple(v.shape)}, but batch and tokens must "
                             "be the same; flamia has no KV cache and no cross-attention")
        cu_seqlens = torch.arange(shape[0] + 1, dtype=torch.int32, device=q.device) * shape[1]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    elif len(shape) != 3:
        raise ValueError(f"q has shape {tuple(shape)} but must be [tokens, heads, head_dim] or [batch, tokens, heads, head_dim]")
    elif cu_seqlens is None:
        cu_seqlens = torch.arange(2, dtype=torch.int32, device=q.device) * shape[0]

    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, _ = torch.ops.flamia.attn_forward(q, k, v, cu_seqlens, recipe.name if isinstance(recipe, Recipe) else recipe,
                                                causal, *_window(window), _scale(scale),
                                                deterministic or torch.are_deterministic_algorithms_enabled(), training)
    if q.dtype == torch.float16 and not torch.is_autocast_enabled(q.device.type):
        out = out.to(torch.float16)
    if len(shape) == 4:
        out, lse = out.view(*shape[:2], *out.shape[1:]), lse.view(lse.shape[0], *shape[:2]).transpose(0, 1)
    return out, lse
