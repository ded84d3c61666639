# SPDX-License-Identifier: Apache-2.0
"""Health figures of attention while a model trains: what quantisation did to its operands.

The figures are counted by the CPU backend on a sample (one head, some documents), for every device and recipe that the CPU backend
knows: some ten milliseconds a layer for the default sample on eight cores, little beside 100 steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, sizeof
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _library, _ops
from ._checks import check_forward
from ._library import lib
from ._plan import recipe as _recipe
from .functional import _scale, _window
from .recipe import Recipe

SAMPLE = 1024  # tokens


@dataclass(frozen=True)
class Operand:
    """Q, K, V or dO as its first product takes it (Q and K rotated, dO divided by the row sum l)."""
    zeros: float      # share of elements that were not 0 and became 0
    saturated: float  # share beyond the largest code
    flagged: float    # share in scale groups that hold NaN or infinity
    exponents: tuple[int, int]  # least and greatest power-of-two scale; (0, 0) without such scales


@dataclass(frozen=True)
class Stats:
    """Of one attention call; see flamia.stats."""
    recipe: str
    q: Operand
    k: Operand
    v: Operand
    p_zeros: float           # share of visible pairs whose P became 0
    p_saturated: float
    d_out: Operand | None    # None without a gradient, like all that follow
    ds_zeros: tuple[float, float] | None      # share of dS that became 0, in the products dQ and dK
    ds_saturated: tuple[float, float] | None
    ds_lost: tuple[float, float] | None       # the share of the sum of |dS| that those zeros held: what they are worth

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Names and numbers for a logger: {"q/zeros": ..., "ds_lost/dq": ...}."""
        found: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Operand):
                found |= {f"{prefix}{name}/{part}": getattr(value, part) for part in ("zeros", "saturated", "flagged")}
                found |= {f"{prefix}{name}/least_exponent": value.exponents[0], f"{prefix}{name}/greatest_exponent": value.exponents[1]}
            elif isinstance(value, tuple):
                found |= {f"{prefix}{name}/dq": value[0], f"{prefix}{name}/dk": value[1]}
            elif isinstance(value, float):
                found[prefix + name] = value
        return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _operand(h: Any) -> Operand:
    return Operand(_share(h.zeros, h.elements), _share(h.saturated, h.elements), _share(h.flagged, h.elements + h.flagged),
                   (h.least_exponent, h.greatest_exponent))


def _host(x: Tensor | None) -> Tensor | None:
    """[tokens, heads, head_dim] on the host, in a dtype that the library reads."""
    return None if x is None else x.detach().to("cpu", torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32).contiguous()


def _count(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, cu_seqlens: Tensor, *, causal: bool, window: tuple[int, int],
           scale: float, recipe: str) -> Stats:
    tokens, query_heads, head_dim = q.shape
    problem = _library.Problem(sizeof(_library.Problem), tokens, len(cu_seqlens) - 1, query_heads, k.shape[1], head_dim, causal,
                               *window, scale, 0)
    tensors = [_host(x) for x in (q, k, v, d_out)]
    views = [None if x is None else byref(_ops._view(x)) for x in tensors]
    offsets = cu_seqlens.detach().to("cpu", torch.int32).contiguous()
    h = _library.Health(struct_size=sizeof(_library.Health))
    made = _recipe(recipe)
    _library.check(lib.flamia_attention_health(byref(problem), made._handle, *views[:3], offsets.data_ptr(), views[3],
                                               torch.get_num_threads(), byref(h)))
    pairs = (_share(h.p_zero, h.pairs), _share(h.p_saturated, h.pairs))
    operands = (_operand(h.q), _operand(h.k), _operand(h.v))
    if d_out is None:
        return Stats(made.name, *operands, *pairs, None, None, None, None)
    return Stats(made.name, *operands, *pairs, _operand(h.d_out), (_share(h.ds_zero_q, h.ds_pairs), _share(h.ds_zero_k, h.ds_pairs)),
                 (_share(h.ds_saturated_q, h.ds_pairs), _share(h.ds_saturated_k, h.ds_pairs)),
                 (_share(h.ds_lost_q, h.ds_mass), _share(h.ds_lost_k, h.ds_mass)))


@torch.no_grad()
def stats(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, d_out: Tensor | None = None, *, causal: bool = True,
          window: tuple[int, int] = (-1, -1), scale: float | None = None, recipe: str | Recipe = "mxfp8") -> Stats:
    """What quantisation does to these operands; d_out, the gradient of attention's output, adds dO and dS.

    q, k, v, cu_seqlens and the keywords as in flamia.attention, packed; on any device. They are copied to the host and attended there:
    hand it a sample (a head, some documents), or let flamia.watch take one.

    An inference recipe has figures without d_out. Raises what flamia.attention raises, for what the CPU backend does not do.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    check_forward(q, k, v, cu_seqlens.to(q.device))
    if d_out is not None and d_out.shape != q.shape:
        raise ValueError(f"d_out has shape {tuple(d_out.shape)} and q {tuple(q.shape)}; d_out is the gradient of attention's output and "
                         "has the shape of q")
    return _count(q, k, v, d_out, cu_seqlens, causal=causal, window=_window(window), scale=_scale(scale),
                  recipe=recipe.name if isinstance(recipe, Recipe) else recipe)


@dataclass
class _Call:
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    options: dict[str, Any]
    head: int
    d_out: Tensor | None = None


@dataclass
class Watch:
    """What `watch` saw. Nothing is copied to the host or counted before `stats` is called."""
    head: int
    tokens: int
    calls: list[_Call] = field(default_factory=list)
    waiting: dict[int, _Call] = field(default_factory=dict)  # by the address of `saved`, until its backward pass

    def stats(self) -> list[Stats]:
        """One entry for each call of flamia's attention, in the order of the forward passes. Waits for the device."""
        return [_count(c.q, c.k, c.v, c.d_out, c.cu_seqlens.cpu().clamp(max=c.q.shape[0]), **c.options) for c in self.calls]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, saved: Tensor, options: dict[str, Any]) -> None:
        head = self.head % q.shape[1]
        key_head = head // (q.shape[1] // k.shape[1])
        sample = (x[: self.tokens, at : at + 1].detach().clone() for x, at in ((q, head), (k, key_head), (v, key_head)))
        call = _Call(next(sample), next(sample), next(sample), cu_seqlens.clone(), options, head)
        self.calls.append(call)
        if saved.numel():
            self.waiting[saved.data_ptr()] = call

    def _backward(self, d_out: Tensor, saved: Tensor) -> None:
        if (call := self.waiting.pop(saved.data_ptr(), None)) is not None:
            call.d_out = d_out[: self.tokens, call.head : call.head + 1].detach().clone()


@contextmanager
def watch(head: int = 0, tokens: int = SAMPLE) -> Iterator[Watch]:
    """Samples every call of flamia's attention inside it, compiled or not: `head` of q, and the first `tokens` tokens.

        with flamia.watch() as seen:          # in one step of a hundred
            loss = model(batch); loss.backward()
        for layer, s in enumerate(seen.stats()):
            log(s.flat(f"layer{layer}/"))

    While it samples, a call costs a few small copies on the device. A document that the sample cuts is counted as far as it goes. With
    activation checkpointing a layer shows up again when it is recomputed, and only then with its gradient. Calls inside a replayed
    CUDA graph are not seen. Scales that span heads or tokens (fp8-tensor) are those of the sample.
    """
    if head < 0 or tokens < 1:
        raise ValueError(f"head = {head}, tokens = {tokens}; head counts from 0 and tokens from 1")
    if _ops.watcher is not None:
        raise RuntimeError("flamia.watch is active already; leave it before entering another")
    _ops.watcher = seen = Watch(head, tokens)
    try:
        yield seen
    finally:
        _ops.watcher = None
        seen.waiting.clear()
