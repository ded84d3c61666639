# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors on a Hopper GPU."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import exact  # noqa: E402
import flamia  # noqa: E402
from flamia import _ops  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]

CU = [0, 70, 70, 71, 198]
TOKENS = 200


def inputs(head_dim: int = 128):
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v, d_out = (torch.randn(TOKENS, heads, head_dim, generator=generator).to(torch.bfloat16) for heads in (4, 2, 2, 4))
    return q, k, v, d_out, torch.tensor(CU, dtype=torch.int32)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "fp8-tensor", "nvfp4", "nvfp4-exact", "sagebwd"])
@torch.no_grad()
def test_forward_as_on_the_cpu(recipe: str, head_dim: int) -> None:
    q, k, v, _, cu = inputs(head_dim)
    out, lse = flamia.attention(q.cuda(), k.cuda(), v.cuda(), cu.cuda(), recipe=recipe, return_lse=True)
    wanted, wanted_lse = flamia.attention(q, k, v, cu, recipe=recipe, return_lse=True)
    assert out.is_cuda and lse.is_cuda
    limit = 0.05  # one code of P more or less; a lost row is 1
    assert exact.worst_row(out.cpu(), wanted) < limit
    # rows of few keys: one code of P more or less is up to 2^-4 of l
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=0.04, rtol=0)
    wrong, wrong_lse = exact.attention(q, k, v, cu, window=(40, -1))
    assert exact.worst_row(out.cpu(), wrong) > limit and float((wrong_lse - wanted_lse)[:, :198].abs().max()) > 0.1


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float().cpu() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_sage3_as_on_the_cpu(causal: bool, head_dim: int) -> None:
    q, k, v, _, cu = inputs(head_dim)
    k[..., ::5] += 6  # means worth subtracting
    q[..., ::7] -= 2
    out, lse = flamia.attention(q.cuda(), k.cuda(), v.cuda(), cu.cuda(), causal=causal, recipe="sage3", return_lse=True)
    wanted, wanted_lse = flamia.attention(q, k, v, cu, causal=causal, recipe="sage3", return_lse=True)
    limit = 8e-3  # sums in another order may put a row's maximum on another step of the grid of P
    assert far(out, wanted) < limit and exact.worst_row(out.cpu(), wanted) < 0.25
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=0.1213, rtol=0)  # 2 ln(17/16): a scale of P, rounded twice
    assert not out[CU[-1]:].any() and bool((lse[:, CU[-1]:] == torch.inf).all())  # tokens of no document
    for other in ("sage3 smooth-q=off", "sage3 p1=e2m1/1x16/e4m3/amax/x0.00037202382", "sage3-exact"):  # the nearest numbers
        assert far(out, flamia.attention(q, k, v, cu, causal=causal, recipe=other)) > 3 * limit, other
    _, wrong_lse = flamia.attention(q * 1.1, k, v, cu, causal=causal, recipe="sage3", return_lse=True)
    assert float((wrong_lse - wanted_lse)[:, :CU[-1]].abs().max()) > 0.3
    for start, stop in zip(CU[:-1], CU[1:], strict=True):  # means, scales and masks are of a document: packed or alone, the same bits
        if stop > start:
            alone = [x[None, start:stop].cuda() for x in (q, k, v)]
            assert torch.equal(flamia.attention(*alone, causal=causal, recipe="sage3")[0], out[start:stop])


def test_sage3_has_no_gradient() -> None:
    q, k, v, _, cu = on_gpu(*inputs())
    with pytest.raises(NotImplementedError, match="has no backward pass; for training use"):
        flamia.attention(q.requires_grad_(), k, v, cu, recipe="sage3")


def run(q, k, v, cu, d_out, recipe: str = "mxfp8", attend=flamia.attention) -> list[torch.Tensor]:
    """(out, d_q, d_k, d_v)."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    try:
        out = attend(*leaves, cu, recipe=recipe)
    except NotImplementedError as error:
        if "backward" in str(error):
            pytest.skip("this build has no backward pass for CUDA tensors")
        raise
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "fp8-tensor", "nvfp4", "nvfp4-exact", "sagebwd"])
def test_gradients_as_on_the_cpu(recipe: str, head_dim: int) -> None:
    q, k, v, d_out, cu = inputs(head_dim)
    got = run(*on_gpu(q, k, v, cu, d_out), recipe)
    wanted = run(q, k, v, cu, d_out, recipe)
    limit = 5e-4  # of 1 - cosine: the Hopper accumulator keeps 13 bits; quantisation itself costs 2e-3
    assert all(exact.distance(a.cpu(), b) < limit for a, b in zip(got, wanted, strict=True))
    assert all(not bool(x[CU[-1]:].any()) for x in got)  # tokens of no document
    shifted = torch.tensor([0, 71, 71, 71, 198], dtype=torch.int32)
    wrong = run(q, k, v, shifted, d_out, recipe)
    assert all(exact.distance(a.cpu(), b) > limit for a, b in zip(got, wrong, strict=True))


@pytest.mark.usefixtures("_deterministic")
def test_deterministic_gradients_repeat() -> None:
    arguments = on_gpu(*(inputs()[i] for i in (0, 1, 2, 4, 3)))
    first = run(*arguments, "mxfp8-exact")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*arguments, "mxfp8-exact"), strict=True))


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("recipe", ["mxfp8-exact", "nvfp4-exact"])
def test_later_tokens_and_other_documents_do_not_reach(recipe: str) -> None:
    q, k, v, d_out, cu = inputs()
    plain = run(*on_gpu(q, k, v, cu, d_out), recipe)
    cut = 150  # inside the last document, 71 ... 197
    loud = [torch.cat([x[:cut], x[cut:198] * 1024, x[198:]]) for x in (q, k, v, d_out)]
    changed = run(*on_gpu(*loud[:3], cu, loud[3]), recipe)
    for i, (a, b) in enumerate(zip(plain, changed, strict=True)):
        kept = 71 if i >= 2 else cut  # dK and dV of earlier keys hear later queries; those of other documents do not
        assert torch.equal(a[:kept], b[:kept]) and not torch.equal(a[cut:198], b[cut:198])


@pytest.mark.usefixtures("_deterministic")
def test_graph_of_a_training_step_with_other_lengths() -> None:
    q, k, v, d_out, cu = on_gpu(*inputs())
    run(q, k, v, cu, d_out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # gradients must exist before the capture
        flamia.attention(*leaves, cu).backward(d_out)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = flamia.attention(*leaves, cu)
        gradients = torch.autograd.grad(out, leaves, d_out)
    for lengths in ([0, 10, 20, 30, TOKENS], CU):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        eager = run(q, k, v, cu, d_out)
        assert all(torch.equal(a, b) for a, b in zip((out, *gradients), eager, strict=True))


@pytest.mark.usefixtures("_deterministic")
def test_compiled_training_step() -> None:
    q, k, v, d_out, cu = on_gpu(*inputs())
    torch.compiler.reset()
    compiled = torch.compile(flamia.attention, fullgraph=True, backend="aot_eager")
    wanted = run(q, k, v, cu, d_out)
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, cu, d_out, attend=compiled), wanted, strict=True))


OPTIONS = ("mxfp8", True, -1, -1, 0.0, True)


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    # bytes of `saved` that belong to no token are whatever lay there, and opcheck compares every byte
    monkeypatch.setattr(_ops, "_buffer", lambda size, device: torch.zeros(size, dtype=torch.uint8, device=device))
    q, k, v, d_out, cu = on_gpu(*inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flamia.attn_forward.default, (*leaves, cu, *OPTIONS, True))
    with torch.no_grad():
        out, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)
    torch.library.opcheck(torch.ops.flamia.attn_backward.default, (d_out, out, cu, saved, 2, *OPTIONS))


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_training_step(reentrant: bool) -> None:
    def attend(*arguments, recipe: str):
        return checkpoint(functools.partial(flamia.attention, recipe=recipe), *arguments, use_reentrant=reentrant)

    q, k, v, d_out, cu = on_gpu(*inputs())
    wanted = run(q, k, v, cu, d_out)
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, cu, d_out, attend=attend), wanted, strict=True))


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_bfloat16(dtype: torch.dtype) -> None:
    def attend(*arguments, recipe: str):
        with torch.autocast("cuda", dtype=dtype):
            return flamia.attention(*arguments, recipe=recipe)

    q, k, v, d_out, cu = on_gpu(*inputs())
    got = run(q.float(), k.float(), v.float(), cu, d_out, attend=attend)
    assert [x.dtype for x in got] == [torch.bfloat16, *[torch.float32] * 3]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, run(q, k, v, cu, d_out), strict=True))


def test_watch_samples_what_the_cpu_counts() -> None:
    q, k, v, d_out, cu = inputs()
    with flamia.watch(head=3) as seen:
        run(*on_gpu(q, k, v, cu, d_out))
    found, = seen.stats()
    assert found == flamia.stats(q[:, 3:], k[:, 1:], v[:, 1:], cu, d_out[:, 3:]) != flamia.stats(q[:, 2:3], k[:, 1:], v[:, 1:], cu, d_out[:, 2:3])


def test_what_nothing_differentiates_raises() -> None:
    q, k, v, d_out, cu = on_gpu(*inputs())
    out = flamia.attention(q.requires_grad_(), k, v, cu)
    gradient, = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda x: flamia.attention(x, k, v, cu).float().sum())(q.detach())


def test_float16_and_views() -> None:
    q, k, v, d_out, cu = on_gpu(*inputs())
    half = [x.to(torch.float16) for x in (q, k, v, d_out)]
    got = run(*half[:3], cu, half[3])
    assert all(x.dtype == torch.float16 for x in got)
    wanted = run(q, k, v, cu, d_out)
    assert all(exact.distance(a.float().cpu(), b.float().cpu()) < 5e-4 for a, b in zip(got, wanted, strict=True))
    wide = torch.cat([q, k, v], dim=1)  # one projection, cut into views
    views = wide.split([4, 2, 2], dim=1)
    assert all(exact.distance(a.cpu(), b.cpu()) < 1e-6 for a, b in zip(run(*views, cu, d_out), wanted, strict=True))
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v, d_out)]  # strides and addresses that the GPU cannot load
    assert all(exact.distance(a.cpu(), b.cpu()) < 1e-6 for a, b in zip(run(*odd[:3], cu, odd[3]), wanted, strict=True))


@torch.no_grad()
def test_runs_on_the_current_stream() -> None:
    q, k, v, _, cu = (x.cuda() for x in inputs())
    wanted = flamia.attention(q, k, v, cu)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on another stream would not wait for this, and read zeros
        late = torch.zeros_like(q)
        late.copy_(q)
        out = flamia.attention(late, k, v, cu)
    stream.synchronize()
    assert torch.equal(out, wanted)


@torch.no_grad()
def test_cuda_graph_with_other_lengths() -> None:
    q, k, v, _, cu = (x.cuda() for x in inputs())
    flamia.attention(q, k, v, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flamia.attention(q, k, v, cu)
    for lengths in ([0, 10, 20, 30, TOKENS], [0, 0, 0, 0, 100], CU):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, flamia.attention(q, k, v, cu))


@pytest.mark.parametrize("lengths", [[0, 70, TOKENS + 1000], [0, -5, 2**31 - 1], [7, 3, 100], [-1, -1, -1]])
@torch.no_grad()
def test_wrong_lengths_write_nothing_outside(lengths: list[int]) -> None:
    q, k, v, _, cu = (x.cuda() for x in inputs())
    wrong = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    before = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    flamia.attention(q, k, v, wrong)
    after = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert bool((before == 7).all()) and bool((after == 7).all())
    flamia.set_debug(True)
    try:
        with pytest.raises(ValueError, match="cu_seqlens"):
            flamia.attention(q, k, v, wrong)
        flamia.attention(q, k, v, cu)
    finally:
        flamia.set_debug(False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", [[0, 70, TOKENS + 1000], [0, -5, 2**31 - 1], [7, 3, 100], [-1, -1, -1]])
def test_wrong_lengths_in_a_training_step(lengths: list[int], deterministic: bool) -> None:
    q, k, v, d_out, cu = on_gpu(*inputs())
    torch.use_deterministic_algorithms(deterministic)
    try:
        wanted = run(q, k, v, cu, d_out)
        guards = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(2)]
        got = run(q, k, v, torch.tensor(lengths, dtype=torch.int32, device="cuda"), d_out)
        guards.append(torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        again = run(q, k, v, cu, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool((x == 7).all()) for x in guards) and all(bool(x.isfinite().all()) for x in got)
    assert all(exact.distance(a.cpu(), b.cpu()) < 1e-5 for a, b in zip(again, wanted, strict=True))


@pytest.mark.parametrize("tokens, cu", [(0, [0]), (0, [0, 0]), (5, [0]), (5, [0, 0, 0])])
def test_empty(tokens: int, cu: list[int]) -> None:
    q, k, v = (torch.randn(tokens, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    out, lse = flamia.attention(q, k, v, torch.tensor(cu, dtype=torch.int32, device="cuda"), return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape and not out.any() and lse.shape == (2, tokens) and bool((lse == torch.inf).all())
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


@torch.no_grad()
def test_cpu_tensors_among_cuda_tensors() -> None:
    q, k, v, _, cu = inputs()
    with pytest.raises(ValueError, match="cu_seqlens is on cpu"):
        flamia.attention(q.cuda(), k.cuda(), v.cuda(), cu)
    with pytest.raises(ValueError, match="k is on cpu and q on cuda:0"):
        flamia.attention(q.cuda(), k, v.cuda(), cu.cuda())
    with pytest.raises(NotImplementedError, match="head.dim.*32"):
        flamia.attention(q.cuda()[..., :32], k.cuda()[..., :32], v.cuda()[..., :32], cu.cuda())
