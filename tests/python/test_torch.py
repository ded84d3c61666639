# SPDX-License-Identifier: Apache-2.0
"""The ops inside torch's machinery: opcheck, torch.compile, checkpointing, autocast, transforms, saved-tensor hooks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

import flamia  # noqa: E402


def inputs(tokens: int = 96, requires_grad: bool = True, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    tensors = [torch.randn(tokens, heads, 32, generator=generator).to(dtype).requires_grad_(requires_grad) for heads in (4, 2, 2)]
    return *tensors, torch.tensor([0, 30, tokens - 6], dtype=torch.int32)


def gradients(function, *arguments):
    tensors = [x.detach().requires_grad_() for x in arguments[:3]]
    out = function(*tensors, *arguments[3:])
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out.float() * weight).sum().backward()
    return out.detach(), *(x.grad for x in tensors)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIONS = ("mxfp8", True, -1, -1, 0.0, False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_forward(training: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.flamia.attn_forward.default, (*inputs(requires_grad=training, dtype=dtype), *OPTIONS, training))


def test_opcheck_backward() -> None:
    q, k, v, cu = inputs(requires_grad=False)
    out, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)
    torch.library.opcheck(torch.ops.flamia.attn_backward.default, (torch.randn_like(out), out, cu, saved, 2, *OPTIONS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(backend: str, dynamic: bool) -> None:
    recipe = flamia.Recipe("mxfp8-exact")

    def function(q, k, v, cu):
        return flamia.attention(q * 1.0, k, v, cu, window=(50, -1), recipe=recipe) + 1

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for tokens in (96, 128, 96):
        assert equal(gradients(compiled, *inputs(tokens)), gradients(function, *inputs(tokens)))


def test_compiles_once_for_all_lengths() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(flamia.attention, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (160, 192, 224, 256):
        q, k, v, _ = inputs(tokens)
        cu = torch.arange(0, tokens + 1, 32, dtype=torch.int32)  # another number of documents each time, never that of the heads
        assert torch.equal(compiled(q, k, v, cu), flamia.attention(q, k, v, cu))
    assert counter.frame_count == 1


def test_symbolic_size_of_saved() -> None:
    def size(q, k, v, cu):
        return torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)[2].numel()

    torch.compiler.reset()
    compiled = torch.compile(size, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (96, 256):
        assert compiled(*inputs(tokens)) == size(*inputs(tokens)) > 0


@pytest.mark.parametrize("call", ["batch", "lse", "flash", "varlen", "two cu_seqlens"])
def test_compile_of_every_function(call: str) -> None:
    def function(q, k, v, cu):
        match call:
            case "batch":
                return flamia.attention(*(x.view(2, 48, *x.shape[1:]) for x in (q, k, v)))
            case "lse":
                out, lse = flamia.attention(q, k, v, cu, return_lse=True)
                return out + lse.detach().T[:, :, None].clamp(max=9)
            case "flash":
                return flamia.flash_attn_func(q[None], k[None], v[None], causal=True)
            case "varlen":
                return flamia.flash_attn_varlen_func(q, k, v, cu, cu, 66, 66, causal=True)
            case _:
                return flamia.flash_attn_varlen_func(q, k, v, cu, cu.clone(), causal=True)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert equal(gradients(compiled, *inputs()), gradients(function, *inputs()))


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return flamia.attention(q, k, v, cu)

    arguments = inputs(requires_grad=False)
    assert torch.equal(torch.export.export(Model(), arguments).module()(*arguments), flamia.attention(*arguments))


def plain(q, k, v, cu):
    return flamia.attention(q.sin(), k, v, cu).sin()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def checkpointed(*arguments):
        return checkpointing.checkpoint(plain, *arguments, use_reentrant=reentrant)

    assert equal(gradients(plain, *inputs()), gradients(checkpointed, *inputs()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_checkpointing(dynamic: bool) -> None:
    def checkpointed(*arguments):
        return checkpointing.checkpoint(plain, *arguments, use_reentrant=False)

    torch.compiler.reset()
    compiled = torch.compile(checkpointed, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert equal(gradients(compiled, *inputs()), gradients(plain, *inputs()))


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """How often flamia::attn_forward really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.calls += function is torch.ops.flamia.attn_forward.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("saveable, calls", [(flamia.SAVEABLE_OPS, 1), ((torch.ops.aten.mul.Tensor,), 2)])
def test_selective_checkpointing_keeps_the_attention(saveable, calls: int) -> None:
    def checkpointed(*arguments):
        contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, list(saveable))
        return checkpointing.checkpoint(plain, *arguments, use_reentrant=False, context_fn=contexts)

    wanted = gradients(plain, *inputs())
    with Counter() as counter:
        assert equal(gradients(checkpointed, *inputs()), wanted)
    assert counter.calls == calls


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_bfloat16(compiled: bool) -> None:
    def function(q, k, v, cu):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flamia.attention(q, k, v.to(torch.bfloat16), cu)

    torch.compiler.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    out, *grads = gradients(run, *inputs(dtype=torch.float32))
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
    wanted, *_ = gradients(flamia.attention, *inputs())
    assert torch.equal(out, wanted)


def test_no_gradients_means_nothing_saved() -> None:
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if function is torch.ops.flamia.attn_forward.default:
                sizes.append(result[2].numel())
            return result

    q, k, v, cu = inputs()
    with Sizes():
        flamia.attention(q, k, v, cu)
        with torch.no_grad():
            flamia.attention(q, k, v, cu)
        flamia.attention(q.detach(), k.detach(), v.detach(), cu)
    assert sizes[0] > 0 and sizes[1:] == [0, 0]


def test_saved_is_smaller_than_the_bfloat16_inputs() -> None:
    q, k, v = (torch.randn(1024, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 1024], dtype=torch.int32)
    _, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)
    assert saved.numel() < 0.6 * sum(x.numel() * x.element_size() for x in (q, k, v))


def test_saved_tensors_may_move() -> None:
    """Offloading hands the backward pass copies, at addresses that torch aligns less than the library wants."""
    def moved(x: torch.Tensor) -> torch.Tensor:
        store = torch.empty(x.numel() * x.element_size() + 64, dtype=torch.uint8)[64:]
        return store.view(x.dtype)[: x.numel()].view(x.shape).copy_(x)

    wanted = gradients(flamia.attention, *inputs())
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x):
        assert equal(gradients(flamia.attention, *inputs()), wanted)


def test_a_changed_cu_seqlens_is_noticed() -> None:
    q, k, v, cu = inputs()
    out = flamia.attention(q, k, v, cu)
    cu += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_some_inputs_need_gradients() -> None:
    q, k, v, cu = inputs()
    wanted = gradients(flamia.attention, q, k, v, cu)
    k = k.detach().requires_grad_()
    out = flamia.attention(q.detach(), k, v.detach(), cu)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out.float() * weight).sum().backward()
    assert torch.equal(k.grad, wanted[2])


def test_expanded_gradient() -> None:
    """out.sum() has a gradient of strides 0."""
    q, k, v, cu = inputs()
    out = flamia.attention(q, k, v, cu)
    a = torch.autograd.grad(out.sum(), q, retain_graph=True)
    b = torch.autograd.grad(out, q, torch.ones_like(out))
    assert torch.equal(a[0], b[0])


def test_python_threads() -> None:
    wanted = gradients(plain, *inputs())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(equal(got, wanted) for got in pool.map(lambda _: gradients(plain, *inputs()), range(12)))


def test_saved_of_another_call_is_refused() -> None:
    q, k, v, cu = inputs(requires_grad=False)
    out, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)
    with pytest.raises(ValueError, match="saved_bytes"):
        torch.ops.flamia.attn_backward(out, out, cu, saved[:-300], 2, *OPTIONS)
    with pytest.raises(ValueError, match="third result"):
        torch.ops.flamia.attn_backward(out, out, cu, saved.float(), 2, *OPTIONS)
    with pytest.raises(ValueError, match="d_out has shape"):
        torch.ops.flamia.attn_backward(out[1:], out, cu, saved, 2, *OPTIONS)


def test_double_backward_is_an_error() -> None:
    q, k, v, cu = inputs()
    out = flamia.attention(q, k, v, cu)
    gradient, = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_gradient_of_lse_is_an_error() -> None:
    q, k, v, cu = inputs()
    needed = [x.requires_grad for x in torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, True)]
    assert needed == [True, False, False]
    out, lse = flamia.attention(q, k, v, cu, return_lse=True)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="lse that flamia.attention returns has no gradient"):
        (out.sum() + lse.clamp(max=9).sum()).backward()


def test_forward_without_training_cannot_go_back() -> None:
    q, k, v, cu = inputs()
    out, _, saved = torch.ops.flamia.attn_forward(q, k, v, cu, *OPTIONS, False)
    assert saved.numel() == 0
    with pytest.raises(RuntimeError, match="training=True"):
        out.sum().backward()


def test_transforms_are_errors() -> None:
    q, k, v, cu = inputs(requires_grad=False)

    def loss(q):
        return flamia.attention(q, k, v, cu).float().sum()

    for transformed in (torch.func.grad(loss), torch.func.vmap(loss), lambda q: torch.func.jvp(loss, (q,), (q,))):
        with pytest.raises(NotImplementedError, match="torch.func"):
            transformed(q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        loss(forward_ad.make_dual(q, torch.ones_like(q)))
    # compiled: the graph breaks at the error, which then is the same
    for transformed in (torch.func.grad(loss), torch.func.vmap(loss), lambda q: torch.func.jvp(loss, (q,), (q,))):
        torch.compiler.reset()
        with pytest.raises(NotImplementedError, match="torch.func"):
            torch.compile(transformed, backend="eager")(q)


def test_module_in_a_state_dict_round_trip(tmp_path) -> None:
    """A recipe beside the weights, as a trainer saves them."""
    layer = torch.nn.Linear(8, 8)
    torch.save({"model": layer.state_dict(), "recipe": flamia.Recipe("mxfp8-exact")}, tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    layer.load_state_dict(state["model"])
    assert state["recipe"] == flamia.Recipe("mxfp8-exact")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_cuda_never_falls_back(requires_grad: bool) -> None:
    """A fake CUDA tensor asks for the CUDA backend also where there is no GPU. Where it cannot train, that is an error."""
    with FakeTensorMode():
        q = torch.empty(64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad)
        try:
            out = flamia.attention(q, q, q)
        except NotImplementedError as error:
            assert "cuda" in str(error).lower() or "backward" in str(error).lower()
        else:
            assert out.device.type == "cuda"


def test_a_build_without_cuda_says_so() -> None:
    from flamia._plan import Call, Plan
    call = Call(64, 1, 2, 2, 64, True, -1, -1, 0.0, "mxfp8", "cuda", 0, 0, False, False)
    try:
        made = Plan(call)
    except NotImplementedError as error:
        without = "no CUDA part" in str(error) and "FLAMIA_CUDA=ON" in str(error)
        assert without or "there is no GPU" in str(error)  # a build with it, on a machine without a GPU
    else:
        assert made.forward_bytes > 0  # a build with it


def test_fake_and_meta_tensors() -> None:
    for mode, device in ((FakeTensorMode(), "cpu"), (contextlib.nullcontext(), "meta")):
        with mode:
            q = torch.empty(64, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            out, lse = flamia.attention(q, q[:, :2], q[:, 2:], return_lse=True)
            out.sum().backward()
            assert out.shape == q.shape == q.grad.shape and lse.shape == (4, 64) and q.grad.dtype == torch.bfloat16
            with pytest.raises(ValueError, match="head_dim = 24"):
                flamia.attention(q[:, :, :24], q[:, :, :24], q[:, :, :24])
