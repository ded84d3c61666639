#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One line per TorchTitan log: steps, mean loss of the last 1000 steps, median tokens/s of the second half, peak memory.

    torchrun ... -m torchtitan.train ... 2>&1 | tee mxfp8.log
    python3 experiments/torchtitan/summary.py mxfp8.log mxfp8-exact.log bf16.log

The loss of single steps is noisy, so recipes are compared by the mean over the last 1000 steps (the logged ones among them).
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import NamedTuple

LAST = 1000
LINE = re.compile(r"step:\s*(\d+)\s+loss:\s*([0-9.]+|nan|inf)\s+grad_norm:\s*([0-9.]+|nan|inf)\s+memory:\s*([0-9.]+)GiB.*?tps:\s*([0-9,]+)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Step(NamedTuple):
    step: int
    loss: float
    grad_norm: float
    memory: float  # GiB
    tokens_per_s: float


def steps(text: str) -> list[Step]:
    """Training steps of a log; of a step that is logged twice (a resumed run) the last line counts. Validation lines do not match."""
    found = (LINE.search(line) for line in COLOUR.sub("", text).splitlines())
    made = {int(m[1]): Step(int(m[1]), float(m[2]), float(m[3]), float(m[4]), float(m[5].replace(",", ""))) for m in found if m}
    return [made[step] for step in sorted(made)]


def summary(name: str, log: list[Step]) -> str:
    if not log:
        raise SystemExit(f"{name} holds no line of TorchTitan's metrics (step: ... loss: ... tps: ...)")
    end = log[-1].step
    last = [s.loss for s in log if s.step > end - LAST]
    speed = statistics.median(s.tokens_per_s for s in log[len(log) // 2:])
    return (f"| {name} | {end} | {statistics.fmean(last):.4f} | {max(s.grad_norm for s in log):.2f} | {speed:,.0f} | "
            f"{max(s.memory for s in log):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    print(f"| run | steps | loss, mean of the last {LAST} steps | greatest gradient norm | tokens/s | GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for path in parser.parse_args().logs:
        print(summary(path.stem, steps(path.read_text())))


if __name__ == "__main__":
    main()
