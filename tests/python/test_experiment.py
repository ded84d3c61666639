# SPDX-License-Identifier: Apache-2.0
"""experiments/gpt trains with flamia's attention."""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")
pytest.importorskip("numpy", reason="the GPT experiment needs numpy: pip install numpy")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments/gpt"))

import attention as attentions  # noqa: E402
import train  # noqa: E402
from corpus import write_corpus  # noqa: E402


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = ["attention", "key", "query", "value", "scale", "tile", "block", "row", "softmax"]
    rng = random.Random(7)
    documents = [" ".join(rng.choices(words, k=rng.randint(3, 40))).encode() for _ in range(300)]
    write_corpus(tmp_path / "corpus.bin.xz", documents[:240], documents[240:])
    return tmp_path / "corpus.bin.xz"


def losses(corpus: Path, out: Path, *more: str) -> tuple[list[float], dict[str, float]]:
    arguments = ["--data", str(corpus), "--out", str(out), "--layers", "2", "--width", "64", "--head-dim", "16", "--context", "128",
                 "--rows", "4", "--steps", "16", "--warmup", "4", "--lr", "3e-3", "--log-every", "2", "--eval-every", "16",
                 "--eval-rows", "8", "--checkpoint-every", "16", "--device", "cpu", *more]
    result = train.train(train.arguments(arguments))
    with (out / "train.csv").open(newline="") as source:
        return [float(line["loss"]) for line in csv.DictReader(source)], result


@pytest.mark.parametrize("attention", ["flamia:mxfp8", "flamia:mxfp8-exact", "emulated:fp8-tensor", "emulated:mxfp8-floor"])
def test_trains(corpus: Path, tmp_path: Path, attention: str) -> None:
    curve, result = losses(corpus, tmp_path / "own", "--attention", attention)
    exact, _ = losses(corpus, tmp_path / "exact", "--attention", "exact")
    assert curve[-1] < curve[0] - 1
    assert curve != exact and all(abs(a - b) < 0.05 for a, b in zip(curve, exact, strict=True))
    assert abs(result["val_loss_own"] - result["val_loss_exact"]) < 0.05
    with (tmp_path / "own/health.csv").open(newline="") as source:
        lines = list(csv.DictReader(source))
    assert [(line["step"], line["layer"], line["recipe"]) for line in lines] == [("16", layer, attention[attention.index(":") + 1:])
                                                                                for layer in "01"]
    assert all(0.98 < float(line[f"cos_{what}"]) < 1 for line in lines for what in ("out", "dq", "dk", "dv"))
    assert all(float(line["cos_dv"]) > 0.998 for line in lines)
    assert all(0 <= float(line["ds_lost_dq"]) < 1e-3 for line in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_on_a_gpu_a_resumed_run_is_the_unbroken_one(corpus: Path, tmp_path: Path) -> None:
    more = ("--attention", "flamia:mxfp8-exact", "--deterministic", "--device", "cuda", "--width", "128", "--head-dim", "64",
            "--eval-every", "8", "--checkpoint-every", "8")
    whole, result = losses(corpus, tmp_path / "a", *more)
    losses(corpus, tmp_path / "b", *more, "--max-seconds", "0")  # stops after two steps
    parts, again = losses(corpus, tmp_path / "b", *more, "--resume")
    assert whole == parts and result["val_loss_own"] == again["val_loss_own"] and whole[-1] < whole[0] - 1
    a, b = (torch.load(tmp_path / run / "checkpoint.pt", weights_only=True)["model"] for run in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_broken_convention_shows_in_the_health(corpus: Path, tmp_path: Path) -> None:
    losses(corpus, tmp_path / "own", "--attention", "emulated:mxfp8+backward_reference=integer")
    with (tmp_path / "own/health.csv").open(newline="") as source:
        assert all(float(line["cos_out"]) > 0.999 and float(line["cos_dv"]) < 0.995 for line in csv.DictReader(source))


def test_the_recipe_is_checked_before_training() -> None:
    with pytest.raises(ValueError, match="mxfp9"):
        attentions.make("flamia:mxfp9", 128)
    with pytest.raises(ValueError, match="needs a recipe"):
        attentions.make("flamia", 128)
