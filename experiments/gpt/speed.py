#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of whole training steps (forward, backward, clipping, AdamW) of the GPT, by attention and document length.

    python3 experiments/gpt/speed.py --attention varlen flamia:mxfp8 flamia:mxfp8-exact --lengths 1024 4096 16384 --out SPEED.csv

Random tokens: text does not change the speed, document lengths do, and here all documents of a step have one length. The attentions take turns, stretch by
stretch, so that the clock and the temperature are the same for all; a figure is the median of the stretches. Every block is compiled.
watched_ms is a step inside flamia.watch, with its stats counted: what a log of every hundredth step costs.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from pathlib import Path

import torch

import attention as attentions
import train
from model import GPT, loss

COLUMNS = ["attention", "length", "tokens", "ms", "ms_least", "ms_greatest", "tokens_per_s", "peak_gb", "watched_ms", "gpu", "torch"]


class Steps:
    """A model with its optimizer, and one batch that it is trained on again and again."""

    def __init__(self, name: str, length: int, options: argparse.Namespace) -> None:
        told = train.arguments(["--attention", name, "--context", str(length), "--device", options.device, *options.rest])
        torch.manual_seed(1)
        self.told, self.attention, self.times = told, attentions.make(name, length), []
        self.model = GPT(train.config_of(told)).to(options.device)
        if options.compile:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.optimizer = train.make_optimizer(self.model, told)
        count = max(1, options.tokens // length)
        self.cu_seqlens = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=options.device)
        self.positions = torch.arange(count * length, device=options.device) % length
        self.tokens, self.targets = (torch.randint(256, (count * length,), device=options.device) for _ in range(2))
        self.device, self.peak = torch.device(options.device), 0

    def run(self, steps: int) -> float:
        """Seconds a step."""
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            with train.autocast(self.told):
                value = loss(self.model, self.tokens, self.targets, self.positions, self.cu_seqlens, self.attention)
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.wait()
        return (time.perf_counter() - began) / steps

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def watched(self) -> float:
        """Seconds of a step that flamia.watch samples, counting included; NaN for other attentions."""
        if not self.told.attention.startswith("flamia:"):
            return math.nan
        import flamia
        self.wait()
        began = time.perf_counter()
        with flamia.watch() as seen:
            self.run(1)
        assert len(seen.stats()) == len(self.model.blocks)
        return time.perf_counter() - began

    def prepare(self) -> None:
        """Compiles, warms up, and finds the memory that one step needs beyond what other models hold."""
        self.run(2)
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated() - sum(p.numel() * p.element_size() * 3 for p in self.model.parameters())
            torch.cuda.reset_peak_memory_stats()
            self.run(1)
            self.peak = torch.cuda.max_memory_allocated() - before


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", nargs="+", required=True, help="as train.py takes it; the first is the one that the others are compared with")
    add("--lengths", type=int, nargs="+", default=[1024, 16384], help="of the documents")
    add("--tokens", type=int, default=16384, help="of a step")
    add("--stretches", type=int, default=5)
    add("--steps", type=int, default=8, help="of a stretch")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--eager", dest="compile", action="store_false", help="without torch.compile")
    add("--out", type=Path, required=True, help="CSV file")
    add("rest", nargs="*", metavar="-- ARGUMENT", help="for train.py: --layers, --width, ...")
    options = parser.parse_args(argv)
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else "none"
    with options.out.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for length in options.lengths:
            torch.compiler.reset()  # torch.compile gives up on a function that it has compiled eight times
            runs = {name: Steps(name, length, options) for name in options.attention}
            for run in runs.values():
                run.prepare()
            for _ in range(options.stretches):
                for run in runs.values():
                    run.times.append(run.run(options.steps))
            base = None
            for name, run in runs.items():
                ms = [1000 * t for t in run.times]
                middle, tokens = statistics.median(ms), run.tokens.numel()
                base, watched = base or middle, 1000 * statistics.median(run.watched() for _ in range(3))
                table.writerow({"attention": name, "length": length, "tokens": tokens, "ms": f"{middle:.3f}", "ms_least": f"{min(ms):.3f}",
                                "ms_greatest": f"{max(ms):.3f}", "tokens_per_s": round(1000 * tokens / middle), "peak_gb": f"{run.peak / 1e9:.2f}",
                                "watched_ms": "" if math.isnan(watched) else f"{watched:.1f}", "gpu": gpu, "torch": torch.__version__})
                file.flush()
                print(f"{length:6} {name:28} {middle:8.2f} ms a step, {middle / base:.3f} of {options.attention[0]}'s; "
                      f"{tokens / middle:.0f} k tokens/s; {run.peak / 1e9:.2f} GB; watched {watched:.1f} ms", flush=True)
            del runs, run


if __name__ == "__main__":
    main()
