# SPDX-License-Identifier: Apache-2.0
"""Outputs and gradients against float64 attention on the unquantised input, and mistakes that the same bounds must catch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import exact  # noqa: E402
import flamia  # noqa: E402

CU = [0, 70, 70, 71, 198]  # documents of 70, 0, 1 and 127 tokens
TOKENS = 200               # two belong to none

# (1 - cosine, worst row) of out and of the gradients. Measured over these cases and three seeds: bf16 2.0e-6, .004, 4.6e-6, .025; the
# others 1.4e-3, .18, 2.5e-3, .32 (head_dim 16: .24 and .36, 128: .37)
BOUNDS = {"bf16": (4e-6, 0.01, 1e-5, 0.05), "mxfp8": (2e-3, 0.3, 3.5e-3, 0.6), "mxfp8-exact": (2e-3, 0.3, 3.5e-3, 0.6)}

CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (20, -1)},
    "window both ways": {"causal": False, "window": (9, 4)},
    "scale": {"scale": 0.2},
}


def inputs(head_dim: int = 64, heads: int = 4, key_heads: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(TOKENS, count, head_dim, generator=generator).to(torch.bfloat16).to(dtype)
    return draw(heads), draw(key_heads), draw(key_heads), draw(heads), torch.tensor(CU, dtype=torch.int32)


def run(q, k, v, d_out, cu, **options):
    """(out, d_q, d_k, d_v) of flamia."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flamia.attention(*leaves, cu, **options)
    out.backward(d_out)
    return out.detach(), *(x.grad for x in leaves)


def complaints(got, wanted, recipe: str) -> list[str]:
    found = []
    for i, name in enumerate(("out", "d_q", "d_k", "d_v")):
        limit, row_limit = BOUNDS[recipe][2 * (i > 0):][:2]
        d, w = exact.distance(got[i], wanted[i]), exact.worst_row(got[i], wanted[i])
        if d > limit:
            found.append(f"{name}: 1 - cosine {d:.2e} > {limit:.2e}")
        if w > row_limit:
            found.append(f"{name}: worst row {w:.3f} > {row_limit:.3f}")
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", BOUNDS)
def test_close_to_float64(recipe: str, case: str) -> None:
    tensors = inputs()
    got = run(*tensors, recipe=recipe, **CASES[case])
    wanted = exact.gradients(tensors[3], *tensors[:3], tensors[4], **CASES[case])
    assert not complaints(got, wanted, recipe)


@pytest.mark.parametrize("head_dim, heads, key_heads", [(16, 2, 2), (32, 6, 2), (128, 3, 1), (256, 1, 1)])
def test_head_dims_and_groups(head_dim: int, heads: int, key_heads: int) -> None:
    tensors = inputs(head_dim, heads, key_heads)
    assert not complaints(run(*tensors), exact.gradients(tensors[3], *tensors[:3], tensors[4]), "mxfp8")


@pytest.mark.parametrize("recipe", BOUNDS)
def test_bounds_catch_mistakes(recipe: str) -> None:
    q, k, v, d_out, cu = inputs()
    right = exact.gradients(d_out, q, k, v, cu)
    got = run(q, k, v, d_out, cu, recipe=recipe)
    assert not complaints(got, right, recipe)

    def wrong(**change: object) -> list[str]:
        arguments = {"q": q, "k": k, "v": v, "cu_seqlens": cu} | change
        return complaints(got, exact.gradients(d_out, **arguments), recipe)

    moved = cu.clone()
    moved[3] += 1
    assert wrong(cu_seqlens=moved), "a key of the next document"
    assert wrong(causal=False, window=(-1, 1)), "mask off by one"
    assert wrong(window=(40, -1)), "a window"
    assert wrong(scale=1.15 * 64 ** -0.5), "scale"
    assert wrong(k=k.roll(1, dims=1)), "key head of another group"
    for i in range(4):  # a row lost, in each result
        lost = [x.clone() for x in got]
        lost[i][100, 0] = 0
        assert complaints(lost, right, recipe), f"a zeroed row of result {i}"


def test_lse_and_tokens_outside_documents() -> None:
    q, k, v, d_out, cu = inputs()
    out, lse = flamia.attention(q, k, v, cu, recipe="bf16", return_lse=True)
    _, wanted = exact.attention(q, k, v, cu)
    assert lse.shape == (4, TOKENS) and lse.dtype == torch.float32
    torch.testing.assert_close(lse[:, :198].double(), wanted[:, :198], atol=0.02, rtol=0)
    assert bool((lse[:, 198:] == torch.inf).all())
    for x in run(q, k, v, d_out, cu):
        assert not x[198:].any() and bool(x[:198].any())


def test_documents_do_not_see_each_other() -> None:
    q, k, v, d_out, cu = inputs()
    before = run(q, k, v, d_out, cu)
    with torch.no_grad():
        for x in (q, k, v, d_out):
            x[71:] *= 100
    after = run(q, k, v, d_out, cu)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:71], b[:71]) and not torch.equal(a[71:], b[71:])


def test_exact_recipe_has_no_leak_from_later_tokens() -> None:
    q, k, v, d_out, cu = inputs()

    def earlier(recipe: str, factor: float):
        scaled = [torch.cat([x[:100], x[100:] * factor]) for x in (q, k, v, d_out)]
        out, d_q, _, _ = run(*scaled, cu, recipe=recipe)
        return out[:100], d_q[:100]

    for a, b in zip(earlier("mxfp8-exact", 1), earlier("mxfp8-exact", 1024), strict=True):
        assert torch.equal(a, b)
    # the control: a block of 32 tokens shares a scale, and 100 lies inside of one
    assert not torch.equal(earlier("mxfp8", 1)[0], earlier("mxfp8", 1024)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_of_the_input(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    got = run(*tensors)
    assert all(x.dtype == dtype for x in got)
    same = run(*inputs())  # the same numbers in bfloat16
    assert not complaints(got, exact.gradients(tensors[3], *tensors[:3], tensors[4]), "mxfp8")
    for a, b in zip(got, same, strict=True):
        assert exact.worst_row(a, b) < 0.02  # rounding of the results


def test_batch_is_documents_of_one_length() -> None:
    q, k, v, d_out, _ = inputs()
    cu = torch.tensor([0, 100, 200], dtype=torch.int32)
    packed = run(q, k, v, d_out, cu)
    batched = run(*(x.view(2, 100, *x.shape[1:]) for x in (q, k, v, d_out)), None)
    for a, b in zip(packed, batched, strict=True):
        assert torch.equal(a.view_as(b), b)
    out, lse = flamia.attention(q[None], k[None], v[None], return_lse=True)
    assert out.shape == q[None].shape and lse.shape == (1, 4, TOKENS)
    assert torch.equal(out[0], flamia.attention(q, k, v))


def test_threads_are_those_of_torch_and_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plan = flamia._ops.plan
    monkeypatch.setattr(flamia._ops, "plan", lambda call: asked.append(call.threads) or plan(call))
    tensors, threads, results = inputs(), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run(*tensors))
    finally:
        torch.set_num_threads(threads)
    assert asked == [1, 1, 3, 3]  # forward, backward
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
