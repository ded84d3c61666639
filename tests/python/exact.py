# SPDX-License-Identifier: Apache-2.0
"""Float64 attention on packed documents, by definition, and the two figures that compare results with it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(cu_seqlens: Tensor, tokens: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """bool [tokens, tokens]: does the query (row) see the key (column)?"""
    position = torch.arange(tokens)
    document = torch.searchsorted(cu_seqlens, position.to(cu_seqlens.dtype), right=True)
    distance = position[None, :] - position[:, None]  # key minus query
    seen = (document[:, None] == document[None, :]) & (document[:, None] < len(cu_seqlens))
    if causal:
        seen &= distance <= 0
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    return seen


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool = True, window: tuple[int, int] = (-1, -1),
              scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [tokens, heads, head_dim], k and v [tokens, key_heads, head_dim]; float64."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible(cu_seqlens, q.shape[0], causal, window)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(dim=1)
    p = torch.softmax(scores.masked_fill(blind[:, None], 0), dim=-1).masked_fill(blind[:, None], 0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind, torch.inf)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: object) -> tuple[Tensor, ...]:
    """(out, d_q, d_k, d_v), float64."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = attention(*inputs, cu_seqlens, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, d_out.double())


def distance(got: Tensor, wanted: Tensor) -> float:
    """1 - cosine, over everything; infinite where got is not finite."""
    got, wanted = got.double().flatten(), wanted.double().flatten()
    if not bool(got.isfinite().all()):
        return torch.inf
    return float(1 - torch.nn.functional.cosine_similarity(got, wanted, dim=0))


def worst_row(got: Tensor, wanted: Tensor) -> float:
    """Greatest error of a [head_dim] row, relative to the row's norm or a third of the rms row norm, whichever is more."""
    got, wanted = got.double(), wanted.double()
    if not bool(got.isfinite().all()):
        return torch.inf
    norm = wanted.norm(dim=-1)
    return float(((got - wanted).norm(dim=-1) / norm.clamp_min(float(norm.square().mean().sqrt()) / 3)).max())
