# SPDX-License-Identifier: Apache-2.0
"""What every peer needs: inputs on the GPU, a float32 reference, timing, and the row that a measurement becomes."""
from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
from typing import Callable, Sequence

import torch
import torch.nn.functional as F

DEVICE = "cuda"
COLUMNS = ("run", "commit", "gpu", "driver", "cuda", "clock_mhz", "workload", "heads", "key_heads", "head_dim", "mask",
           "mode", "implementation", "part", "ms", "tflops", "error")
WORKLOADS = pathlib.Path(__file__).resolve().parent.parent / "workloads.json"


class Absent(Exception):
    """A peer that cannot be measured here; the text says what is missing."""


def workloads() -> dict[str, list[int]]:
    return json.loads(WORKLOADS.read_text())["workloads"]


def median_ms(call: Callable[[], object], mode: str, repeats: int = 15, warm: int = 4) -> float:
    """burst: median of single launches between two events; sustained: mean over back-to-back launches, median of five series."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    series, batch = (repeats, 1) if mode == "burst" else (5, 20)
    times = []
    for _ in range(series):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(batch):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / batch)
    return statistics.median(times)


def forward_flops(lengths: Sequence[int], heads: int, head_dim: int, mask: str) -> float:
    """4 L^2 d h a document, half of it causal; the backward pass counts 2.5 times as much."""
    return sum((2.0 if mask == "causal" else 4.0) * n * n * head_dim * heads for n in lengths)


@dataclasses.dataclass
class Measurement:
    """What a peer returns: milliseconds a part, and the tensors (O, dQ, dK, dV; O alone where it has no backward pass)."""
    forward_ms: float
    backward_ms: float | None
    tensors: list[torch.Tensor]


class Inputs:
    """Random BF16 operands of one workload: q [tokens, heads, d], k and v [tokens, key_heads, d], dout like q, cu int32 [documents + 1]."""

    def __init__(self, lengths: Sequence[int], heads: int, key_heads: int, head_dim: int, mask: str, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        total = sum(lengths)

        def make(count: int) -> torch.Tensor:
            return torch.randn(total, count, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)

        self.lengths, self.longest, self.causal = list(lengths), max(lengths), mask == "causal"
        self.equal_lengths = len(set(lengths)) == 1
        self.q, self.k, self.v, self.dout = make(heads), make(key_heads), make(key_heads), make(heads)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.cu = torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)
        shortest = min(range(len(lengths)), key=lambda i: lengths[i])
        self.checked = slice(ends[shortest] - lengths[shortest], ends[shortest]) if lengths[shortest] <= 8192 else None

    def reference(self) -> list[torch.Tensor] | None:
        """O, dQ, dK, dV of the shortest document in float32; None where even that is long."""
        if self.checked is None:
            return None
        q, k, v = (t[self.checked].float().transpose(0, 1).requires_grad_() for t in (self.q, self.k, self.v))
        group = q.shape[0] // k.shape[0]
        out = F.scaled_dot_product_attention(q[None], k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None],
                                             is_causal=self.causal)[0]
        grads = torch.autograd.grad(out, (q, k, v), self.dout[self.checked].float().transpose(0, 1))
        return [t.detach().transpose(0, 1) for t in (out, *grads)]

    def error(self, tensors: Sequence[torch.Tensor], reference: Sequence[torch.Tensor] | None) -> str:
        """Greatest relative L2 error of the tensors on the checked document."""
        if reference is None:
            return ""
        worst = max(((a[self.checked].float() - b).norm() / b.norm()).item() for a, b in zip(tensors, reference))
        return f"{worst:.2e}"


def machine() -> dict[str, str]:
    """GPU, driver and clock as nvidia-smi names them; read before the run, so the clock is a hint only."""
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader,nounits"],
                           capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver, clock = (part.strip() for part in query.split(","))
    return {"gpu": name, "driver": driver, "clock_mhz": clock, "cuda": torch.version.cuda or ""}


def clock_mhz() -> str:
    return subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          check=True).stdout.split()[0]


class Rows:
    """Appends measurements to one CSV file; the header is written once."""

    def __init__(self, path: str, **fixed: str) -> None:
        self.fixed = fixed
        new = not os.path.exists(path) or os.path.getsize(path) == 0
        self.file = open(path, "a", newline="")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        if new:
            self.writer.writeheader()

    def add(self, **row: object) -> None:
        self.writer.writerow({**self.fixed, **row})
        self.file.flush()
