# SPDX-License-Identifier: Apache-2.0
"""The figures that experiments/torchtitan reads from a log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments/torchtitan"))

import summary  # noqa: E402


def line(step: int, loss: float, tps: str = "12,345") -> str:
    return (f"[titan] - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  \x1b[33mgrad_norm:  1.2500  \x1b[36mmemory: 41.50GiB"
            f"(29.85%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 88.10  \x1b[35mmfu: 8.91%\x1b[0m")


def test_the_last_thousand_steps_count() -> None:
    text = "\n".join([line(500, 9.0), line(1000, 5.0), "validate step: 1500  loss:  2.0", line(1500, 4.0), line(2000, 3.0), line(2000, 2.0, "9,000")])
    log = summary.steps(text)
    assert [s.step for s in log] == [500, 1000, 1500, 2000]
    assert summary.summary("mxfp8", log) == "| mxfp8 | 2000 | 3.0000 | 1.25 | 10,672 | 41.5 |"  # (4 + 2) / 2: step 1000 is not among them


def test_a_log_without_steps() -> None:
    with pytest.raises(SystemExit, match="no line"):
        summary.summary("empty", summary.steps("nothing\n"))
