# SPDX-License-Identifier: Apache-2.0
"""What the README and docs/pytorch.md show runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

README, PAGE = (Path(__file__).resolve().parents[2] / name for name in ("README.md", "docs/pytorch.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_training_script_lowers_the_loss() -> None:
    script, = (b for b in blocks(README) if "optimizer.step()" in b)
    assert len([line for line in script.splitlines() if line.strip()]) <= 30
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6 and losses[0] > 5 and losses[-1] < 3, done.stdout


def test_the_other_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    q, k, v = (torch.randn(64, 4, 64, requires_grad=True) for _ in range(3))
    model = torch.nn.Linear(4, 4)
    given = {"torch": torch, "q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 20, 64], dtype=torch.int32), "model": model}
    assert blocks(PAGE)
    for block in blocks(PAGE):
        exec(compile(block, PAGE.name, "exec"), dict(given))
