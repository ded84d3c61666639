# SPDX-License-Identifier: Apache-2.0
"""Operands of attention as a model hands them over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from registry import Attention


@dataclass(frozen=True)
class Operands:
    """What one layer's attention got and gave: q, k, v, o [tokens, heads, head_dim]; o.grad is filled by backward()."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    cu_seqlens: Tensor
    scale: float


class Tap:
    """An attention that passes everything through and keeps the operands of every call, layer by layer."""

    def __init__(self, inner: Attention) -> None:
        self.inner, self.calls = inner, []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        o = self.inner(q, k, v, cu_seqlens, scale)
        o.retain_grad()
        self.calls.append(Operands(q, k, v, o, cu_seqlens, scale))
        return o
