# SPDX-License-Identifier: Apache-2.0
"""flamia inside TorchTitan's models and its trainer, at reduced size on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")
pytest.importorskip("torchtitan", reason="these tests need TorchTitan 0.3: pip install torchtitan")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("torchtitan.models.common.attention", reason="this TorchTitan needs another PyTorch", exc_type=ImportError)

import flamia  # noqa: E402
import flamia.torchtitan as plugin  # noqa: E402
from torchtitan.config.manager import ConfigManager  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments/torchtitan"))
import summary  # noqa: E402


def build(recipe: str, layers: int = 2) -> torch.nn.Module:
    config = model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:layers]
    plugin.use(config, recipe)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def run(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return model(tokens, positions, model.get_attention_masks(positions))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2048, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_documents_of_a_batch() -> None:
    positions = torch.cat([torch.arange(n) for n in (40, 1, 23, 31, 33)]).view(2, 64)
    model, ids = build("mxfp8-exact"), tokens(2, 64)
    out = run(model, ids, positions)
    for row, first, last in ((0, 0, 40), (0, 41, 64), (1, 0, 31), (1, 31, 64)):
        alone = run(model, ids[row:row + 1, first:last], torch.arange(last - first)[None])
        torch.testing.assert_close(out[row, first:last], alone[0], atol=1e-3, rtol=1e-3)
    one = run(model, ids, torch.arange(64).expand(2, 64))
    assert float((one[0, 41:] - out[0, 41:]).norm() / out[0, 41:].norm()) > 0.02


@torch.no_grad()
def test_the_recipe_is_the_one_asked_for() -> None:
    ids, positions = tokens(1, 64), torch.arange(64)[None]
    exact, mxfp8, again = (run(build(recipe), ids, positions) for recipe in ("bf16", "mxfp8", "mxfp8"))
    assert torch.equal(mxfp8, again) and 1e-4 < float((mxfp8 - exact).norm() / exact.norm()) < 0.1


def test_a_few_steps_lower_the_loss() -> None:
    model, ids = build("mxfp8"), tokens(2, 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    positions, losses = torch.arange(64).expand(2, 64), []
    with flamia.watch() as seen:
        for _ in range(6):
            loss = torch.nn.functional.cross_entropy(run(model, ids[:, :-1], positions).flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    assert len(seen.calls) == 12 and all(call.options["recipe"] == "mxfp8" and call.d_out is not None for call in seen.calls)


@pytest.mark.parametrize("name, recipe", [("llama3_1b_mxfp8", "mxfp8"), ("llama3_1b_mxfp8_exact", "mxfp8-exact"),
                                          ("llama3_1b_fp8_tensor", "fp8-tensor"), ("llama3_1b_nvfp4", "nvfp4"),
                                          ("llama3_1b_nvfp4_exact", "nvfp4-exact"), ("llama3_1b_sagebwd", "sagebwd"), ("llama3_1b_bf16", None)])
def test_configurations(name: str, recipe: str | None) -> None:
    """As torchtitan.train reads them from --module and --config."""
    config = ConfigManager().parse_args(["--module", "flamia.torchtitan", "--config", name, "--training.steps", "7"])
    inner = [layer.attention.inner_attention for layer in config.model_spec.model.layers]
    assert len(inner) == 16 and config.training.steps == 7 and config.training.seq_len == 2048
    assert [getattr(x, "recipe", None) for x in inner] == [recipe] * 16
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.model_spec.model.build().parameters())
    assert 1.1e9 < parameters < 1.4e9


def test_errors() -> None:
    with pytest.raises(ValueError, match="mxfp9"):
        plugin.use(model_registry("debugmodel", attn_backend="varlen").model, "mxfp9")
    inner = plugin.FlamiaAttention.Config(recipe="mxfp8").build()
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(TypeError, match="VarlenMetadata"):
        inner(x, x, x, attention_masks=None)
    masks = build("mxfp8", 1).get_attention_masks(torch.arange(8)[None])
    with pytest.raises(NotImplementedError, match="log-sum-exp"):
        inner(x, x, x, attention_masks=masks, out_transform=lambda out, lse: out)


def test_the_trainer_itself(tmp_path: Path) -> None:
    """TorchTitan's trainer, data loader, sharding and selective checkpointing; only the sizes and the device are others."""
    command = [sys.executable, ROOT / "experiments/torchtitan/reduced.py", tmp_path, "--module", "flamia.torchtitan", "--config",
               "llama3_1b_mxfp8_exact", "--training.steps", "8", "--debug.seed", "1", "--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    log = summary.steps(done.stderr + done.stdout)
    assert [step.step for step in log] == list(range(1, 9)) and log[-1].loss < log[0].loss - 0.5
    assert all(0.1 < step.grad_norm < 100 for step in log)
    # 8 steps of 2 batches and 2 layers; attention whose output is not kept would run again in every backward pass
    assert "32 forward passes of attention, 32 with a backward pass" in done.stdout
    weights = safetensors.safe_open(tmp_path / "out/checkpoint/step-8/model-00001-of-00001.safetensors", "pt")
    assert weights.get_slice("model.layers.1.self_attn.q_proj.weight").get_shape() == [256, 256]  # for lm-eval


def test_checkpointing_keeps_the_attention() -> None:
    config = plugin.llama3_1b_mxfp8()
    assert flamia.SAVEABLE_OPS[0] in config.activation_checkpoint.build().get_save_ops()
    assert flamia.SAVEABLE_OPS[0] not in plugin.llama3_1b_bf16().activation_checkpoint.build().get_save_ops()
