# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of the GPT experiment: seconds on a CPU; the GPU cases are skipped where there is none."""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import pytest

import extract
from corpus import read_corpus, write_corpus

torch = pytest.importorskip("torch", reason="the GPT experiment needs PyTorch: pip install torch")
np = pytest.importorskip("numpy", reason="the GPT experiment needs numpy: pip install numpy")
pytest.importorskip("safetensors", reason="the GPT experiment needs safetensors: pip install safetensors")

import attention as attentions  # noqa: E402
import capture  # noqa: E402
import runs  # noqa: E402
import speed  # noqa: E402
import train  # noqa: E402
from data import Packed, gather, read_documents  # noqa: E402
from model import GPT, Config, loss  # noqa: E402

needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(autouse=True)
def _kernels_as_before():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = ["attention", "key", "query", "value", "scale", "tile", "block", "row", "softmax"]
    rng = random.Random(7)
    documents = [" ".join(rng.choices(words, k=rng.randint(3, 40))).encode() for _ in range(300)]
    write_corpus(tmp_path / "corpus.bin.xz", documents[:240], documents[240:])
    return tmp_path / "corpus.bin.xz"


def tiny(corpus: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(corpus), "--out", str(out), "--layers", "2", "--width", "64", "--head-dim", "16", "--context", "128",
            "--rows", "4", "--warmup", "4", "--lr", "3e-3", "--log-every", "2", "--eval-every", "4", "--eval-rows", "8",
            "--checkpoint-every", "4", "--attention", "sdpa", "--device", "cpu", *more]


def test_corpus_file_returns_the_documents(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.xz", [b"one", "zw\u00f6lf".encode()], [b"held out"])
    assert read_corpus(tmp_path / "c.xz") == ([b"one", "zw\u00f6lf".encode()], [b"held out"])
    with pytest.raises(ValueError, match="byte 0"):
        write_corpus(tmp_path / "d.xz", [b"a\x00b"], [])


def test_plain_text_is_cut_at_pages(tmp_path: Path) -> None:
    pages = [b"  <page>\n    page %d\n  </page>\n" % i for i in range(40)]
    (tmp_path / "enwik").write_bytes(b"<mediawiki>\n" + b"".join(pages))
    kept, held_out = read_documents(tmp_path / "enwik")
    assert kept[1:] + held_out == pages and 1 <= len(held_out) <= 3
    with pytest.raises(FileNotFoundError, match="collect.py"):
        read_documents(tmp_path / "missing")


def test_markup_is_taken_off() -> None:
    page = ('.TH gcvt 3\n.\\" a comment\n.SH NAME\ngcvt \\- convert\n.PP\nThe\n.BR gcvt ()\nfunction \\fIadds\\fP\n'
            ".nf\n  a\n.B  b\n.fi\n")
    assert extract.tidy(extract.man_page(page)) == "gcvt(3)\n\nNAME\ngcvt - convert\n\nThe gcvt() function adds\n  a\nb\n"
    assert extract.pod("=head1 NAME\n\nB<perl> and C<< a > b >> E<lt>\n\n=cut\n\ncode\n") == "NAME\n\nperl and a > b <"
    assert extract.html_page("<head><title>x</title></head><div class='navheader'>up</div><p>a <b>b</b>\n c</p>") == "a b c"
    assert extract.chapters("x\n1. One\ny\n2. Two\n", r"^\d\. ") == ["x\n", "1. One\ny\n", "2. Two\n"]


def test_packing_keeps_documents_apart(corpus: Path) -> None:
    documents, _ = read_documents(corpus)
    packed = Packed(documents, row=128, rows=4, seed=3)
    stream = torch.from_numpy(packed.stream.copy())
    plan = packed.plan(0, packed.batches + 2)  # into the second epoch
    for offsets, cu in zip(plan.offsets, plan.cu_seqlens, strict=True):
        batch = gather(stream, offsets, cu, 128)
        starts = set(cu.tolist()) - {512}
        assert {0, 128, 256, 384} <= starts
        assert {i for i in range(512) if batch.tokens[i] == 0 or i % 128 == 0} == starts
        assert {i for i in range(512) if batch.positions[i] == 0} == starts
        inside = [i for i in range(511) if (i + 1) % 128]
        assert all(batch.targets[i] == batch.tokens[i + 1] for i in inside)
    first_epoch = plan.offsets[: packed.batches].flatten().tolist()
    assert len(set(first_epoch)) == len(first_epoch)


@pytest.mark.parametrize(("name", "device"), [("sdpa", "cpu"), pytest.param("sdpa", "cuda", marks=needs_gpu),
                                              pytest.param("varlen", "cuda", marks=needs_gpu)])
def test_attention_is_the_exact_one_inside_documents(name: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    row, cu = 128, torch.tensor([0, 17, 100, 128, 200, 256, 256, 256], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(256, 2, 64, generator=generator).to(device, dtype) for _ in range(4))

    def run(which: str, cu: torch.Tensor) -> list[torch.Tensor]:
        operands = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attentions.make(which, row)(*operands, cu, 0.125)
        return [o.detach(), *torch.autograd.grad(o, operands, do)]

    def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(a, b, strict=True))

    want = run("exact", cu)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert distance(run(name, cu), want) < bound
    shifted = torch.tensor([0, 18, 100, 128, 200, 256, 256, 256], dtype=torch.int32, device=device)
    assert distance(run(name, shifted), want) > 2 * bound  # one boundary off by one must show


def test_exact_attention_against_float64() -> None:
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    q, k, v = torch.randn(3, 16, 1, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(1)).unbind(0)
    want = torch.zeros(16, 8, dtype=torch.float64)
    for begin, end in ((0, 5), (5, 16)):
        for i in range(begin, end):
            weights = torch.softmax(0.3 * k[begin : i + 1, 0].double() @ q[i, 0].double(), 0)
            want[i] = weights @ v[begin : i + 1, 0].double()
    assert torch.allclose(attentions.make("exact", 16)(q, k, v, cu, 0.3)[:, 0].double(), want, atol=1e-6)
    assert want.isfinite().all()


def test_unknown_attention_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'flash9' is unknown.*exact, flamia, sdpa, varlen"):
        attentions.make("flash9", 128)


@pytest.mark.parametrize("device", DEVICES)
def test_training_lowers_the_loss_and_logs_both_losses(corpus: Path, tmp_path: Path, device: str) -> None:
    result = train.train(train.arguments(tiny(corpus, tmp_path / "run", "--steps", "60", "--qk-norm", "--device", device)))
    lines = list(csv.DictReader((tmp_path / "run/train.csv").open()))
    assert len(lines) == 30 and float(lines[0]["loss"]) > 5 and result["val_loss_exact"] < 3
    assert abs(result["val_loss_own"] - result["val_loss_exact"]) < 0.02


@pytest.mark.parametrize(("device", "optimizer"), [("cpu", "adamw"), ("cpu", "muon"), pytest.param("cuda", "adamw", marks=needs_gpu)])
def test_resumed_run_is_the_unbroken_run_bit_for_bit(corpus: Path, tmp_path: Path, device: str, optimizer: str) -> None:
    more = ("--steps", "12", "--deterministic", "--device", device, "--optimizer", optimizer)
    if device == "cuda":
        more += ("--attention", "varlen")
    train.train(train.arguments(tiny(corpus, tmp_path / "a", *more)))
    train.train(train.arguments(tiny(corpus, tmp_path / "b", *more, "--max-seconds", "0")))  # stops at step 2
    train.train(train.arguments(tiny(corpus, tmp_path / "b", *more, "--resume")))
    a, b = (torch.load(tmp_path / run / "checkpoint.pt", weights_only=True) for run in "ab")
    assert a["step"] == b["step"] == 12
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    losses = [[line["loss"] for line in csv.DictReader((tmp_path / run / "train.csv").open())] for run in "ab"]
    assert losses[0] == losses[1]


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = GPT(Config(layers=2, width=32, head_dim=16, context=64))
    optimizer = train.make_optimizer(model, train.arguments(["--optimizer", "muon", "--device", "cpu"]))
    adamw, muon = ([p for group in part.param_groups for p in group["params"]] for part in optimizer.parts)
    assert len(muon) == 2 * 4 and isinstance(optimizer.parts[1], torch.optim.Muon)
    assert {id(p) for p in adamw + muon} == {id(p) for p in model.parameters()} and len(adamw + muon) == len(list(model.parameters()))


def test_capture_writes_the_true_gradient(corpus: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    train.train(train.arguments(tiny(corpus, tmp_path / "run", "--steps", "8", "--dtype", "float32")))
    capture.main(["--run", str(tmp_path / "run"), "--data", str(corpus), "--out", str(tmp_path), "--heads", "0", "2", "--early",
                  "0", "--min-documents", "2", "--max-documents", "9", "--device", "cpu"])
    with safe_open(tmp_path / "gpt-late.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        facts = file.metadata()
    assert facts["layer"] == "1" and facts["heads"] == "[0, 2]"
    assert all(tensors[key].shape == (128, 2, 16) and tensors[key].dtype == torch.bfloat16 for key in ("q", "k", "v", "dout"))
    assert tensors["cu_seqlens"].dtype == torch.int32 and np.all(np.diff(tensors["cu_seqlens"].numpy()) % 32 != 0)


def test_tapped_gradient_against_finite_differences(corpus: Path) -> None:
    torch.manual_seed(0)
    held_out = Packed(read_documents(corpus)[1], row=64, rows=1)
    model = GPT(Config(layers=2, width=32, head_dim=16, context=64)).double()
    offset, cu = capture.choose_row(held_out, 1, 9)
    inner = attentions.make("sdpa", 64)
    calls, _ = capture.capture(model, held_out, offset, cu, inner, torch.float64)
    direction = torch.randn_like(calls[0].o)
    batch = gather(torch.from_numpy(held_out.stream.copy()), torch.tensor([offset]), torch.from_numpy(cu), 64)

    def moved(by: float) -> float:
        count = iter(range(2))
        def pushed(*operands: object) -> torch.Tensor:
            return inner(*operands) + (by * direction if next(count) == 0 else 0)
        return float(loss(model, batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, pushed).detach())

    slope = (moved(1e-2) - moved(-1e-2)) / 2e-2
    first, second = (float((call.o.grad * direction).sum()) for call in calls)
    assert slope == pytest.approx(first, rel=1e-2)
    assert slope != pytest.approx(second, rel=1e-2)  # the other layer's gradient must not pass


@pytest.mark.parametrize(("name", "layer"), [("gpt-early", "0"), ("gpt-late", "5")])
def test_committed_captures_are_what_their_readme_says(name: str, layer: str) -> None:
    from safetensors import safe_open
    with safe_open(Path(__file__).parents[2] / f"data/{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        facts = file.metadata()
    assert (facts["layer"], facts["heads"], facts["steps"]) == (layer, "[0, 3, 6]", "6000")
    assert tensors.pop("cu_seqlens").tolist() == [0, 62, 363, 610, 813, 1024]
    assert all(x.shape == (1024, 3, 128) and x.dtype == torch.bfloat16 and x.isfinite().all() for x in tensors.values())
    assert all(float(x.float().norm(dim=-1).min()) > 0 for x in tensors.values())  # no token was left unwritten


def test_several_runs_go_on_where_they_stopped(corpus: Path, tmp_path: Path) -> None:
    common = tiny(corpus, tmp_path / "unused", "--steps", "8", "--deterministic")
    for name in ("--out", "--attention"):
        at = common.index(name)
        del common[at:at + 2]

    def command(seconds: str) -> list[str]:
        return ["--attention", "sdpa", "exact", "--seeds", "1", "2", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results"),
                "--seconds", seconds, "--", *common]
    assert runs.main(command("0")) == 1 and not (tmp_path / "results").exists()
    assert runs.main(command("1e9")) == 0
    assert len(list((tmp_path / "results").iterdir())) == 4 * 4
    before = (tmp_path / "runs/sdpa-seed1/train.csv").stat().st_mtime_ns
    assert runs.main(command("1e9")) == 0 and (tmp_path / "runs/sdpa-seed1/train.csv").stat().st_mtime_ns == before
    assert runs.name_of("emulated:mxfp8 p-in-ds=codes") == "emulated-mxfp8-p-in-ds-codes"
    text = (tmp_path / "results/run-exact-seed2.json").read_text()
    assert str(tmp_path) not in text


def test_wrong_arguments_end_with_a_sentence(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(tiny(tmp_path / "none", tmp_path / "a")) == 2
    assert "no such file; make a corpus with collect.py" in capsys.readouterr().err
    assert train.main([*tiny(corpus, tmp_path / "a"), "--attention", "flash"]) == 2
    assert "attention 'flash' is unknown" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        train.main([*tiny(corpus, tmp_path / "a"), "--log-every", "2", "--eval-every", "3"])
    assert "must be a multiple of --log-every 2" in capsys.readouterr().err


@pytest.mark.parametrize("more, wanted", [([], 2), (["--whole"], 1)])
def test_runs_that_would_be_cut_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], wanted: int) -> None:
    started, now = [], [0.0]

    def pretend(told: argparse.Namespace) -> None:
        started.append(told.attention)
        now[0] += 6
    monkeypatch.setattr(train, "train", pretend)
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    runs.main(["--attention", "sdpa", "exact", "varlen", "--out", str(tmp_path), "--results", str(tmp_path), "--seconds", "10", *more, "--"])
    assert started == ["sdpa", "exact"][:wanted]


def test_speed_of_steps(tmp_path: Path) -> None:
    speed.main(["--attention", "sdpa", "exact", "--lengths", "64", "128", "--tokens", "128", "--stretches", "3", "--steps", "1", "--device", "cpu", "--eager",
                "--out", str(tmp_path / "speed.csv"), "--", "--layers", "1", "--width", "32", "--head-dim", "16"])
    rows = list(csv.DictReader((tmp_path / "speed.csv").open()))
    assert [(row["attention"], row["length"], row["tokens"]) for row in rows] == [(name, length, "128") for length in ("64", "128")
                                                                                   for name in ("sdpa", "exact")]
    assert all(0 < float(row["ms_least"]) <= float(row["ms"]) <= float(row["ms_greatest"]) for row in rows)
