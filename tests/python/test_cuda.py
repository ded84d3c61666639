# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors on a Hopper GPU. The backward cases check for the error as long as that backend cannot train."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import exact  # noqa: E402
import flamia  # noqa: E402

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
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact"])
@torch.no_grad()
def test_forward_as_on_the_cpu(recipe: str, head_dim: int) -> None:
    q, k, v, _, cu = inputs(head_dim)
    out, lse = flamia.attention(q.cuda(), k.cuda(), v.cuda(), cu.cuda(), recipe=recipe, return_lse=True)
    wanted, wanted_lse = flamia.attention(q, k, v, cu, recipe=recipe, return_lse=True)
    assert out.is_cuda and lse.is_cuda
    limit = 0.05  # one code of P more or less; a lost row is 1
    assert exact.worst_row(out.cpu(), wanted) < limit
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=0.02, rtol=0)
    wrong, _ = exact.attention(q, k, v, cu, window=(40, -1))
    assert exact.worst_row(out.cpu(), wrong) > limit


def test_training() -> None:
    q, k, v, d_out, cu = inputs()
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    try:
        out = flamia.attention(*leaves, cu.cuda())
    except NotImplementedError as error:
        assert "backward" in str(error)
        return
    out.backward(d_out.cuda())
    on_cpu = [x.requires_grad_() for x in (q, k, v)]
    flamia.attention(*on_cpu, cu).backward(d_out)
    for a, b in zip(leaves, on_cpu, strict=True):
        assert exact.distance(a.grad.cpu(), b.grad) < 1e-4


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


@torch.no_grad()
def test_cpu_tensors_among_cuda_tensors() -> None:
    q, k, v, _, cu = inputs()
    with pytest.raises(ValueError, match="cu_seqlens is on cpu"):
        flamia.attention(q.cuda(), k.cuda(), v.cuda(), cu)
    with pytest.raises(ValueError, match="k is on cpu and q on cuda:0"):
        flamia.attention(q.cuda(), k, v.cuda(), cu.cuda())
    with pytest.raises(NotImplementedError, match="head_dim = 32"):
        flamia.attention(q.cuda()[..., :32], k.cuda()[..., :32], v.cuda()[..., :32], cu.cuda())
