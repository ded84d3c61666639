#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Three ways to set the tensor scale of NVFP4 Q and K (recipe nvfp4-exact), on the CPU backend: accuracy and leak, as a Markdown table.

  constant  1
  delayed   the greatest magnitude of the 16 steps before, over 448 * 6
  current   the greatest magnitude of this call's tensor, over 448 * 6

Magnitudes are those after the rotation, as the quantiser sees them. A scale from data is one for all heads, tokens and documents.

  FLAMIA_LIBRARY=.../libflamia.so PYTHONPATH=python experiments/tensor_scale/compare.py > experiments/tensor_scale/results.md
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import flamia
import torch
from torch import Tensor

TOKENS, HEADS, DIM, CUT = 512, 4, 128, 384  # one document; tokens from CUT on are amplified for the leak
HISTORY, LARGEST = 16, 448 * 6
SIGNS = 0x243F6A8885A308D313198A2E03707344  # docs/numerics.md, section 5


def rotate(x: Tensor) -> Tensor:
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < DIM:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.tensor([-1.0 if SIGNS >> (127 - c) & 1 else 1.0 for c in range(DIM)])
    return (x.float() * signs) @ hadamard / math.sqrt(DIM)


def greatest(x: Tensor) -> float:
    return rotate(x).abs().max().item()


Step = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, gradient of o


def normal(step: int) -> Step:
    random = torch.Generator().manual_seed(1000 + step)
    q, k, v, g = (torch.randn(TOKENS, HEADS, DIM, generator=random).bfloat16() for _ in range(4))
    return q, k, v, g


def scaled(q_factor: Callable[[int], float], k_factor: Callable[[int], float]) -> Callable[[int], Step]:
    def make(step: int) -> Step:
        q, k, v, g = normal(step)
        return q * q_factor(step), k * k_factor(step), v, g
    return make


def spike(step: int) -> Step:
    """One key of this step alone, 64 times the others, seen by nobody before it and hardly attended to."""
    q, k, v, g = normal(step)
    if step == HISTORY:
        k[CUT - 1] = -64 * q[CUT:].float().mean(0).sign().bfloat16()
    return q, k, v, g


INPUTS: dict[str, Callable[[int], Step]] = {
    "N(0, 1)": normal,
    "both grow 1.3 times a step": scaled(lambda n: 1.3 ** (n - HISTORY), lambda n: 1.3 ** (n - HISTORY)),
    "K 64 times larger than in the steps before, Q as much smaller": scaled(lambda n: 1 / 64 if n == HISTORY else 1.0,
                                                                           lambda n: 64.0 if n == HISTORY else 1.0),
    "K 2^-14, Q 2^14": scaled(lambda _: 2.0 ** 14, lambda _: 2.0 ** -14),
    "one key 64 times the others": spike,
}


def recipe(q_scale: float, k_scale: float) -> str:
    return (f"nvfp4-exact q1=e2m1/1x16/e4m3/amax_or_smaller/x{q_scale:.9g} k1=e2m1/1x16/e4m3/amax_or_smaller/x{k_scale:.9g}")


def scales(way: str, make: Callable[[int], Step], q: Tensor, k: Tensor) -> tuple[float, float]:
    if way == "constant":
        return 1.0, 1.0
    if way == "current":
        return greatest(q) / LARGEST, greatest(k) / LARGEST
    history = [make(step) for step in range(HISTORY)]
    return tuple(max(greatest(step[i]) for step in history) / LARGEST for i in (0, 1))  # type: ignore[return-value]


def exact(step: Step) -> tuple[Tensor, Tensor]:
    """O and dQ in float64."""
    q, k, v, g = (x.double() for x in step)
    q.requires_grad_()
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(DIM)
    p = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf).softmax(-1)
    o = torch.einsum("hij,jhd->ihd", p, v)
    o.backward(g)
    assert q.grad is not None
    return o.detach(), q.grad


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))


def attend(step: Step, text: str) -> tuple[Tensor, Tensor]:
    q, k, v, g = step
    q = q.detach().clone().requires_grad_()
    lengths = torch.tensor([0, TOKENS], dtype=torch.int32)
    o = flamia.attention(q, k, v, cu_seqlens=lengths, causal=True, recipe=text)
    o.backward(g)
    assert q.grad is not None
    return o.detach(), q.grad


def leak(step: Step, way: str, make: Callable[[int], Step]) -> float:
    """Greatest change of O and dQ before CUT, relative to the greatest O or dQ, when all from CUT on is amplified."""
    worst = 0.0
    before = attend(step, recipe(*scales(way, make, step[0], step[1])))
    for factor in (16.0, 1e4):
        loud = tuple(torch.cat([x[:CUT], x[CUT:] * factor]) for x in step)
        after = attend(loud, recipe(*scales(way, make, loud[0], loud[1])))  # type: ignore[arg-type]
        for a, b in zip(before, after, strict=True):
            worst = max(worst, ((a - b)[:CUT].abs().max() / a.abs().max().clamp_min(1e-30)).item())
    return worst


def rows() -> Iterator[str]:
    for name, make in INPUTS.items():
        step = make(HISTORY)
        o, d_q = exact(step)
        for way in ("constant", "delayed", "current"):
            text = recipe(*scales(way, make, step[0], step[1]))
            got_o, got_dq = attend(step, text)
            yield f"| {name} | {way} | {cosine(got_o, o):.4f} | {cosine(got_dq, d_q):.4f} | {leak(step, way, make):.1e} |"


if __name__ == "__main__":
    print("Made by `experiments/tensor_scale/compare.py` on the CPU backend.\n")
    print("| input | tensor scale of Q and K | O | dQ | leak of O, dQ |\n| --- | --- | --- | --- | --- |")
    for row in rows():
        print(row, flush=True)
