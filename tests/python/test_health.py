# SPDX-License-Identifier: Apache-2.0
"""flamia.stats and flamia.watch: figures that can be computed by hand, and that a training step is sampled where it should be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import torch.utils.checkpoint as checkpointing  # noqa: E402

import flamia  # noqa: E402


def inputs(tokens: int = 96, heads: int = 4, key_heads: int = 2, head_dim: int = 64):
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_out = (torch.randn(tokens, h, head_dim, generator=generator).to(torch.bfloat16) for h in (heads, key_heads, key_heads, heads))
    return q, k, v, d_out, torch.tensor([0, 40, tokens], dtype=torch.int32)


def test_normal_operands_are_healthy() -> None:
    q, k, v, d_out, cu = inputs()
    s = flamia.stats(q, k, v, cu, d_out, recipe="mxfp8")
    assert s.recipe == "mxfp8"
    for operand in (s.q, s.k, s.v, s.d_out):
        assert operand.zeros < 2e-3 and operand.saturated == operand.flagged == 0
        assert operand.exponents[0] <= operand.exponents[1]
    assert -9 <= s.v.exponents[0] <= s.v.exponents[1] <= -6  # the greatest of 32 x 64 normal numbers, over 448
    assert 0 <= s.ds_zeros[0] < 0.01 and 0 <= s.ds_lost[0] < 1e-4 and s.ds_saturated == (0, 0)


def test_zeros_and_exponents_by_hand() -> None:
    """V: one large channel, the others too small for its scale."""
    v = torch.full((64, 1, 64), 2.0 ** -20)
    v[:, :, 0] = 448.0
    q = torch.zeros_like(v)
    s = flamia.stats(q, q, v, recipe="mxfp8")
    assert s.v.exponents == (0, 0) and s.v.zeros == pytest.approx(63 / 64) and s.v.saturated == 0
    assert s.q.zeros == 0 and s.q.exponents == (0, 0)  # zeros stay zeros and have no exponent
    assert s.d_out is None and s.ds_zeros is None
    v[:, :, 0] = 2.0 ** -20
    s = flamia.stats(q, q, v, recipe="mxfp8")
    assert s.v.zeros == 0 and s.v.exponents == (-28, -28)


def test_the_floor_rule_saturates() -> None:
    v = torch.full((64, 1, 64), 511.0)  # floor: 2^0, largest code 448
    q = torch.zeros_like(v)
    assert flamia.stats(q, q, v, recipe="mxfp8-floor").v.saturated == 1
    assert flamia.stats(q, q, v, recipe="mxfp8").v.saturated == 0


def test_not_finite_tokens_are_flagged() -> None:
    q, k, v, d_out, cu = inputs()
    v[3, 0, 5] = torch.inf
    assert flamia.stats(q, k, v, cu, d_out, recipe="mxfp8-exact").v.flagged == pytest.approx(1 / (96 * 2))  # the token's own head
    assert flamia.stats(q, k, v, cu, d_out, recipe="mxfp8").v.flagged == pytest.approx(32 / (96 * 2))  # its block of 32


def test_sharp_heads_show() -> None:
    """docs/numerics.md, section 1: sharp scores send many elements of dS in E4M3 to zero, but little of their sum."""
    q, k, v, d_out, cu = inputs()
    flat, sharp = (flamia.stats(q * scale, k, v, cu, d_out, recipe="mxfp8 ds=e4m3") for scale in (1, 16))
    assert flat.ds_zeros[1] < 0.01 < 0.1 < sharp.ds_zeros[1] and sharp.p_zeros > 0.1 > flat.p_zeros
    assert sharp.ds_lost[1] < 0.01 * sharp.ds_zeros[1]


def test_flat_names_every_figure_once() -> None:
    q, k, v, d_out, cu = inputs()
    flat = flamia.stats(q, k, v, cu, d_out).flat("layer3/")
    assert {"layer3/q/zeros", "layer3/d_out/greatest_exponent", "layer3/p_zeros", "layer3/ds_lost/dk"} <= set(flat)
    assert len(flat) == 4 * 5 + 2 + 3 * 2 and all(isinstance(x, (int, float)) for x in flat.values())


def model(q, k, v, cu):
    return flamia.attention(q, k, v, cu).sin(), flamia.attention(q, k, v, cu, recipe="mxfp8-exact", window=(30, -1))


@pytest.mark.parametrize("way", ["plain", "compiled", "checkpointed"])
def test_watch_samples_every_call(way: str) -> None:
    q, k, v, d_out, cu = inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    with flamia.watch(head=1) as seen:
        if way == "checkpointed":
            first, second = checkpointing.checkpoint(run, *leaves, cu, use_reentrant=False)
        else:
            first, second = run(*leaves, cu)
        torch.autograd.backward([first, second], [d_out, d_out])
    found = seen.stats()
    if way == "checkpointed":
        assert [s.d_out is None for s in found] == [True, True, False, False]
        found = found[2:]
    assert [s.recipe for s in found] == ["mxfp8", "mxfp8-exact"]
    # the same sample by hand: query head 1, and key head 0 that it shares
    by_hand = flamia.stats(q[:, 1:2], k[:, :1], v[:, :1], cu, d_out[:, 1:2], recipe="mxfp8-exact", window=(30, -1))
    assert found[1] == by_hand
    other_head = flamia.stats(q[:, 2:3], k[:, 1:2], v[:, 1:2], cu, d_out[:, 2:3], recipe="mxfp8-exact", window=(30, -1))
    assert found[1] != other_head


def test_watch_cuts_long_rows_and_ends() -> None:
    q, k, v, d_out, cu = inputs()
    with flamia.watch(tokens=50) as seen, torch.no_grad():
        flamia.attention(q, k, v, cu)
        with pytest.raises(RuntimeError, match="active already"), flamia.watch():
            pass
    flamia.attention(q, k, v, cu)
    found, = seen.stats()
    assert found == flamia.stats(q[:50, :1], k[:50, :1], v[:50, :1], torch.tensor([0, 40, 50], dtype=torch.int32))


def test_inference_recipes_have_figures_of_the_forward_pass() -> None:
    q, k, v, d_out, cu = inputs()
    s = flamia.stats(q, k, v, cu, recipe="sage3")
    assert s.recipe == "sage3" and s.v.saturated == 0 and s.d_out is None
    with flamia.watch() as seen, torch.no_grad():
        flamia.attention(q, k, v, cu, recipe="sage3")
    assert [x.recipe for x in seen.stats()] == ["sage3"]
    with pytest.raises(NotImplementedError, match="no backward pass"):
        flamia.stats(q, k, v, cu, d_out, recipe="sage3")


def test_errors() -> None:
    q, k, v, d_out, cu = inputs()
    with pytest.raises(ValueError, match="d_out has shape"):
        flamia.stats(q, k, v, cu, d_out[:5])
    with pytest.raises(NotImplementedError, match="E5M2"):
        flamia.stats(q, k, v, cu, recipe="mxfp8 ref=phase32 p1=e5m2/constant/none/none p2=e5m2/constant/none/none")
    with pytest.raises(ValueError, match="cu_seqlens"):
        flamia.stats(q, k, v, torch.tensor([0, 500], dtype=torch.int32))
    with pytest.raises(ValueError, match="tokens = 0"), flamia.watch(tokens=0):
        pass
