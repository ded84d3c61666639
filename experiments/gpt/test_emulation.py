# SPDX-License-Identifier: Apache-2.0
"""The torch emulation has the CPU backend's numbers, and its deliberate mistakes do not."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch", reason="the GPT experiment needs PyTorch: pip install torch")
flamia = pytest.importorskip("flamia", reason="the emulation is compared with the flamia package")

import attention as attentions  # noqa: E402
import emulation  # noqa: E402
import emulation_graph  # noqa: E402
import emulation_numbers  # noqa: E402
import flamia._library  # noqa: E402
from emulation_numbers import Tiles  # noqa: E402
from flamia_attention import IN_KERNELS  # noqa: E402
from registry import Attention  # noqa: E402

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
CU = [0, 5, 5, 300, 301, 420]  # tokens 420 ... 423 belong to no document
TOKENS = 424
PUBLISHED = "sagebwd k1=int8/64xall/f32/amax k2=int8/64xall/f32/amax v1=int8/64xall/f32/amax v2=bf16 p2=int8/128x64/f32/amax ds=128x64"
RECIPES = ["mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8-floor", "bf16", "mxfp8 ds=32x32", "mxfp8 dq=f32", "mxfp8-exact ds=row32",
           "mxfp8 ds=e4m3", "mxfp8 ds=bf16", "mxfp8-exact ds=bf16", "nvfp4 ds=bf16", "mxfp8 p-in-ds=codes", "mxfp8 ref=phase32",
           "mxfp8 ref=tilesum", "mxfp8-exact ref=tilesum", "nvfp4", "nvfp4-exact", "nvfp4-full", "nvfp4-full d=output", "sagebwd",
           "mxfp8-exact d=scores", "mxfp8 p-in-ds=codes d=scores", PUBLISHED]


def bound(recipe: str, device: str) -> float:
    """Of the difference relative to the norm, over out, d_q, d_k, d_v. Measured on a CPU: 0 to 7e-6; bf16 3e-4, which like dS in BF16 has no
    scale that would hide the last bit of a sum, and recipes with scales that are no powers of two 4e-4. On a GPU sums have another order and
    exp2 another last bit, which decide a code now and then."""
    if recipe.split()[0] in ("bf16", "sagebwd", "nvfp4-full"):
        return 1e-2 if device == "cuda" and recipe != "bf16" else 1e-3
    bf16 = json.loads(flamia.Recipe(recipe).to_json())["d_s"]["first"]["element"] == "bf16"
    return 2e-3 if device == "cuda" else 2e-4 if bf16 else 2e-5


def run(attention, head_dim: int = 128, device: str = "cpu", sharp: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(TOKENS, 1, head_dim, generator=generator) for _ in range(4))
    size, other = (torch.exp2(torch.randn(TOKENS, 1, 1, generator=generator) * s) for s in (sharp, 1.0))  # exponents vary by token
    leaves = [x.bfloat16().to(device).requires_grad_() for x in (q * other, k, v * size)]
    out = attention(*leaves, torch.tensor(CU, dtype=torch.int32, device=device), head_dim ** -0.5)
    out.backward((d_out * size.flip(0)).bfloat16().to(device))
    return [x.detach().float().cpu() for x in (out, *(x.grad for x in leaves))]


def distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("sharp", [1.0, 4.0])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_the_cpu_backend(recipe: str, device: str, sharp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATION_BACKEND", "none")
    wanted = run(attentions.make(f"flamia:{recipe}", TOKENS), sharp=sharp)
    assert distance(run(attentions.make(f"emulated:{recipe}", TOKENS), device=device, sharp=sharp), wanted) < bound(recipe, device)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.inductor), pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-floor"])
def test_compiled_numbers(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("EMULATION_BACKEND", "inductor" if device == "cuda" else "aot_eager")
    got, wanted = run(attentions.make(f"emulated:{recipe}", TOKENS), device=device), run(attentions.make(f"flamia:{recipe}", TOKENS))
    limit = 2 * bound(recipe, device)  # one kernel adds up in yet another order
    assert distance(got, wanted) < limit
    assert distance(run(attentions.make(f"flamia:{recipe} ds=32x32", TOKENS)), wanted) > 2 * limit


def test_tiles_without_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which fill up the sizes of a graph."""
    wanted = run(attentions.make("emulated:mxfp8-floor", TOKENS))
    made: list[Tiles] = []

    def filled(layers: emulation_graph.Layers, tokens: int, cu_seqlens: torch.Tensor) -> Tiles:
        made.append(Tiles(cu_seqlens, tokens, lambda count: emulation_graph.capacity(count, tokens, TOKENS)))
        return made[-1]
    monkeypatch.setattr(emulation_graph.Layers, "_take", filled)
    got = run(attentions.make("emulated:mxfp8-floor", TOKENS))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert [len(step) for step in made[-1].steps] == [64, 3, 2, 1]
    assert [len(step) for step in Tiles(torch.tensor(CU), TOKENS).steps] == [6, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_of_two_layers_and_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_out = (torch.randn(TOKENS, 2, 128, generator=generator).bfloat16().cuda() for _ in range(4))

    def step(attention: Attention, lengths: list[int]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        cu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        out = attention(leaves[0] + attention(*leaves, cu, 0.1), *leaves[1:], cu, 0.1)
        out.backward(d_out)
        return [out.detach(), *(x.grad for x in leaves)]
    steps = (CU, [0, TOKENS], CU, [0, 100, 423], [0, *range(3, TOKENS, 60)])
    made = {}
    for backend in ("none", "graphs"):
        monkeypatch.setenv("EMULATION_BACKEND", backend)
        attention = attentions.make("emulated:mxfp8-floor", TOKENS)
        made[backend] = [step(attention, lengths) for lengths in steps]
    for got, wanted in zip(made["graphs"], made["none"], strict=True):
        assert distance(got, wanted) < 4 * bound("mxfp8-floor", "cuda")
    assert distance(made["none"][0], made["none"][1]) > 0.1
    cus = [torch.tensor(lengths, dtype=torch.int32, device="cuda") for lengths in (CU, [0, TOKENS])]
    first, _ = (attention(q.clone().requires_grad_(), k, v, cu, 0.1) for cu in cus)
    with pytest.raises(RuntimeError, match="keep one forward pass"):
        first.backward(d_out)


def test_small_gradients_meet_the_floor_of_first_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^-100 (src/quantize/scale.hpp): below it codes are 0, and no division by a subnormal number makes NaN of a zero."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(TOKENS, 1, 128, generator=generator) for _ in range(4))
    cu = torch.tensor(CU, dtype=torch.int32)

    def gradients(name: str) -> list[torch.Tensor]:
        leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        return [x.double() for x in torch.autograd.grad(attentions.make(name, TOKENS)(*leaves, cu, 128 ** -0.5), leaves, (d_out * 1e-27).bfloat16())]
    wanted, limit = gradients("flamia:nvfp4-full"), bound("nvfp4-full", "cpu")
    assert distance(gradients("emulated:nvfp4-full"), wanted) < limit
    monkeypatch.setattr(emulation_numbers, "_level", lambda amax: torch.where(amax == 0, 1, amax / (448 * 6)))
    assert distance(gradients("emulated:nvfp4-full"), wanted) > 10 * limit


def test_d_of_its_own_numbers_where_tokens_are_alike() -> None:
    """dO * O knows the V of O; where values have much in common, what the other copy of V rounded is more than dP - D."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, d_out = (torch.randn(TOKENS, 1, 128, generator=generator).bfloat16() for _ in range(4))
    v = (torch.randn(128, generator=generator) + 0.1 * v).bfloat16()
    cu = torch.tensor(CU, dtype=torch.int32)

    def d_q(name: str) -> torch.Tensor:
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(attentions.make(name, TOKENS)(leaf, k, v, cu, 128 ** -0.5), leaf, d_out)[0].double().flatten()
    wanted = d_q("exact")
    plain, own = (float(torch.nn.functional.cosine_similarity(d_q(name), wanted, dim=0)) for name in ("emulated:nvfp4-full d=output", "emulated:nvfp4-full"))
    assert plain < 0.5 and own > plain + 0.2, (plain, own)


def test_head_dim_64() -> None:
    got, wanted = (run(attentions.make(f"{name}:mxfp8-exact", TOKENS), 64) for name in ("emulated", "flamia"))
    assert distance(got, wanted) < bound("mxfp8-exact", "cpu")


def test_other_numbers_are_further_away() -> None:
    base = "mxfp8 ds=e4m3"
    wanted = run(attentions.make(f"flamia:{base}", TOKENS))
    for other in ("mxfp8-exact ds=e4m3", "mxfp8 ds=32x32", "mxfp8 ds=bf16", f"{base} dq=f32"):  # the closest relatives
        assert distance(run(attentions.make(f"emulated:{other}", TOKENS)), wanted) > 5 * bound(base, "cpu"), other
    for other in ("fp8-tensor", "mxfp8-floor", f"{base} rotate=off", f"{base}+backward_exp2=schraudolph", f"{base}+backward_reference=integer",
                  f"{base}+ds=constant8"):
        assert distance(run(attentions.make(f"emulated:{other}", TOKENS)), wanted) > 5 * bound(base, "cuda"), other
    for base, other in (("sagebwd", "sagebwd smooth-k=off"), ("nvfp4-full", "nvfp4")):
        wanted = run(attentions.make(f"flamia:{base}", TOKENS))
        assert distance(run(attentions.make(f"emulated:{other}", TOKENS)), wanted) > 2 * bound(base, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_backward_pass_of_the_library_with_another_reference(device: str) -> None:
    wrong, right = (run(attentions.make(f"emulated:mxfp8{mistake}", TOKENS)) for mistake in ("+backward_reference=integer", ""))
    got = run(attentions.make("flamia:mxfp8+backward_reference=integer", TOKENS), device=device)
    limit = 0.03 if device == "cuda" else bound("mxfp8", device)  # the Hopper accumulator keeps 13 bits
    assert distance(got, wrong) < limit and distance(got[:1], right[:1]) < limit  # out is as it should be
    assert all(distance([a], [b]) > 3 * limit for a, b in zip(got[1:], right[1:], strict=True))


MADE = os.environ.get("FLAMIA_MISTAKE") if hasattr(flamia._library.lib, "flamia_makes_mistakes") else None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("option", [option for option in IN_KERNELS if MADE in (None, IN_KERNELS[option])])
def test_mistakes_of_the_kernels(option: str) -> None:
    """The mistake that FLAMIA_MISTAKE asks a library with mistakes.patch for is the emulation's. The usual library makes none."""
    wrong, right = (run(attentions.make(f"emulated:mxfp8{mistake}", TOKENS)) for mistake in (f"+{option}", ""))
    got = run(attentions.make("flamia:mxfp8", TOKENS), device="cuda")
    for a, b, c in list(zip(got, wrong, right, strict=True))[1:3]:  # dQ, dK: how far along the mistake they are
        along = float(((a - c) * (b - c)).sum() / (b - c).square().sum())
        assert abs(along) < 0.5 if MADE is None else 0.6 < along < 1.4, along


def test_a_mistake_that_the_library_does_not_make_is_refused() -> None:
    if hasattr(flamia._library.lib, "flamia_makes_mistakes"):
        pytest.skip("this library makes it")
    with pytest.raises(RuntimeError, match="mistakes.patch"):
        attentions.make("flamia:mxfp8+ds=constant8", TOKENS)
    with pytest.raises(ValueError, match="has no option ds=constant9"):
        attentions.make("flamia:mxfp8+ds=constant9", TOKENS)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "fp8-tensor"])
def test_codes_of_the_cpu_backend(recipe: str) -> None:
    """One key and one query see each other alone: out is the value's own rounding, so the codes of V show in it, bit for bit."""
    cu = torch.arange(TOKENS + 1, dtype=torch.int32)
    v = (torch.randn(TOKENS, 2, 64) * torch.exp2(torch.randn(TOKENS, 1, 1) * 4)).bfloat16()
    q = torch.zeros_like(v)
    assert torch.equal(attentions.make(f"emulated:{recipe}", 1)(q, q, v, cu, 1.0), flamia.attention(q, q, v, cu, scale=1.0, recipe=recipe))


@pytest.mark.parametrize("tokens, sharp, louder", [(1100, 0.3, 8.0), (3300, 6.0, 1.0)])
def test_tilesum_with_rows_that_are_done_again(tokens: int, sharp: float, louder: float) -> None:
    """Flat rows over the late keys that meet greater ones (1349 are done again), and peaked rows that settle (25)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 2, 128, generator=generator) for _ in range(3))
    k[:tokens // 3] *= louder
    q, k, v, cu = (q * sharp).bfloat16(), k.bfloat16(), v.bfloat16(), torch.tensor([0, tokens], dtype=torch.int32)
    got, same, other = (attentions.make(name, tokens)(q, k, v, cu, 128 ** -0.5).float()
                        for name in ("emulated:mxfp8 ref=tilesum", "flamia:mxfp8 ref=tilesum", "flamia:mxfp8 ref=phase32"))
    step = bound("mxfp8 ds=e4m3", "cpu")  # no gradient: dS does not loosen it
    assert distance([got], [same]) < step and distance([got], [other]) > 20 * step


@pytest.mark.parametrize("recipe", ["mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3", "mxfp8 ds=32x32", "mxfp8-floor ds=e4m3", "mxfp8 ds=bf16"])
def test_what_rounding_does_to_ds(recipe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_out = ((torch.randn(TOKENS, 1, 128, generator=generator) * size).bfloat16() for size in (2, 2, 1, 1e-5))
    cu = torch.tensor(CU, dtype=torch.int32)
    got, wanted = emulation.ds_shares(recipe, q, k, v, cu, d_out, 128 ** -0.5), flamia.stats(q, k, v, cu, d_out, recipe=recipe)
    bf16 = recipe.endswith("bf16")
    for use, name in enumerate(("dq", "dk")):
        assert got[f"ds_zeros_{name}"] == pytest.approx(wanted.ds_zeros[use], rel=1e-3) and (wanted.ds_zeros[use] > 0.01) != bf16
        assert got[f"ds_lost_{name}"] == pytest.approx(wanted.ds_lost[use], rel=1e-3)
        assert 0.0005 < got[f"ds_error_{name}"] < 0.004 if bf16 else 0.01 < got[f"ds_error_{name}"] < 0.05
    constant = emulation.ds_shares("mxfp8+ds=constant8", q, k, v, cu, d_out, 128 ** -0.5)
    assert constant["ds_lost_dq"] > 0.1 and constant["ds_error_dk"] > 0.1


def test_what_it_does_not_emulate_is_refused() -> None:
    e5m2 = "mxfp8 ref=phase32 p1=e5m2/constant/none/none p2=e5m2/constant/none/none"
    for name, match in ((e5m2, "codes of P"), ("sagebwd smooth-q=on", "smoothing of Q"), ("sage3", "backward")):
        with pytest.raises(NotImplementedError, match=match):
            run(attentions.make(f"emulated:{name}", TOKENS))
    with pytest.raises(ValueError, match="backward_exp2=mitchell"):
        attentions.make("emulated:mxfp8+backward_exp=cubic", TOKENS)
    with pytest.raises(ValueError, match="needs a recipe"):
        emulation.emulated("", TOKENS)
