# SPDX-License-Identifier: Apache-2.0
"""Views that work, and every kind of input that does not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import flamia  # noqa: E402
from flamia import _checks  # noqa: E402

T = 50


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]), dtype=torch.float32).to(torch.bfloat16)


def good() -> dict[str, object]:
    return {"q": draw(T, 4, 32), "k": draw(T, 2, 32), "v": draw(T, 2, 32) * 2,
            "cu_seqlens": torch.tensor([0, 20, T], dtype=torch.int32)}


def results(q, k, v, cu):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flamia.attention(*leaves, cu)
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


VIEWS = {
    "of one projection": lambda x: torch.cat([x, x], dim=1)[:, x.shape[1]:],
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other token": lambda x: torch.stack([x, x + 1], dim=1).flatten(0, 1)[::2],
    "a slice of the channels": lambda x: torch.cat([x, x], dim=2)[:, :, 32:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_views(view: str) -> None:
    g = good()
    q, k, v = (VIEWS[view](g[name]) for name in "qkv")
    assert not q.is_contiguous() and q.stride(2) == 1 and torch.equal(q, g["q"])
    for a, b in zip(results(q, k, v, g["cu_seqlens"]), results(**{"cu" if n == "cu_seqlens" else n: x for n, x in g.items()}), strict=True):
        assert torch.equal(a, b)


def test_expanded_heads() -> None:
    """One key head shown as two has a stride of 0."""
    q, cu = draw(T, 4, 32), torch.tensor([0, T], dtype=torch.int32)
    k, v = draw(T, 1, 32), draw(T, 1, 32) * 2
    assert torch.equal(flamia.attention(q, k.expand(T, 2, 32), v.expand(T, 2, 32), cu), flamia.attention(q, k, v, cu))


def test_batch_views() -> None:
    q, k, v = (draw(2, heads, T, 32) for heads in (4, 2, 2))  # batch, heads, tokens
    views = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(flamia.attention(*views), flamia.attention(*(x.contiguous() for x in views)))


def test_strided_cu_seqlens() -> None:
    g = good()
    strided = torch.tensor([[0, 9], [20, 9], [T, 9]], dtype=torch.int32)[:, 0]
    assert torch.equal(flamia.attention(g["q"], g["k"], g["v"], strided), flamia.attention(**g))


@pytest.mark.parametrize("shape, cu", [((0, 2, 32), [0]), ((0, 2, 32), [0, 0]), ((5, 2, 32), [0]), ((5, 2, 32), [0, 0, 0])])
def test_empty(shape: tuple[int, ...], cu: list[int]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out, lse = flamia.attention(q, k, v, torch.tensor(cu, dtype=torch.int32), return_lse=True)
    out.sum().backward()
    assert out.shape == shape and not out.any() and lse.shape == (2, shape[0]) and bool((lse == torch.inf).all())
    assert all(x.grad.shape == shape and not x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("shape", [(0, 7, 2, 32), (3, 0, 2, 32)])
def test_empty_batch(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = flamia.attention(q, k, v)
    out.sum().backward()
    assert out.shape == shape and all(x.grad.shape == shape for x in (q, k, v))


BAD = {
    # name: (changed arguments, exception, words of the message)
    "list": ({"q": [1.0]}, TypeError, "q is a list"),
    "cu_seqlens as a list": ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens is a list"),
    "sparse": ({"q": torch.ones(T, 4, 32).to_sparse()}, TypeError, "q has the layout torch.sparse_coo"),
    "nested": ({"q": torch.nested.nested_tensor([torch.ones(9, 4, 32)], layout=torch.jagged)}, TypeError, "values"),
    "two axes": ({"q": draw(T, 32)}, ValueError, r"q has shape \(50, 32\)"),
    "k of two axes": ({"k": draw(T, 32)}, ValueError, r"k has shape \[50, 32\]"),
    "batch and cu_seqlens": ({n: draw(1, T, 2, 32) for n in "qkv"}, ValueError, "batch axis"),
    "batch of q alone": ({"q": draw(1, T, 2, 32)}, ValueError, "four axes"),
    "integers": ({n: torch.ones(T, 2, 32, dtype=torch.int8) for n in "qkv"}, TypeError, "int8"),
    "float64": ({n: torch.ones(T, 2, 32, dtype=torch.float64) for n in "qkv"}, TypeError, "float64"),
    "mixed dtypes": ({"k": draw(T, 2, 32).float()}, TypeError, "one dtype"),
    "other device": ({"k": torch.empty(T, 2, 32, dtype=torch.bfloat16, device="meta")}, ValueError, "one device"),
    "channels not contiguous": ({"q": draw(T, 32, 4).transpose(1, 2)}, ValueError, r"q.contiguous\(\)"),
    "tokens of k": ({"k": draw(T + 1, 2, 32), "v": draw(T + 1, 2, 32)}, ValueError, "KV cache"),
    "shapes of k and v": ({"v": draw(T, 1, 32)}, ValueError, "must be the same"),
    "head_dim of k": ({"k": draw(T, 2, 16), "v": draw(T, 2, 16)}, ValueError, "head_dim"),
    "heads": ({"k": draw(T, 3, 32), "v": draw(T, 3, 32)}, ValueError, "query_heads = 4 is no multiple of key_heads = 3"),
    "head_dim": ({n: draw(T, 2, 24) for n in "qkv"}, ValueError, "head_dim = 24"),
    "cu_seqlens int64": ({"cu_seqlens": torch.tensor([0, T])}, TypeError, r"to\(torch.int32\)"),
    "cu_seqlens that requires grad": ({"cu_seqlens": torch.tensor([0.0, T], requires_grad=True)}, TypeError, "int32"),
    "cu_seqlens of two axes": ({"cu_seqlens": torch.tensor([[0, T]], dtype=torch.int32)}, ValueError, r"\[documents \+ 1\]"),
    "cu_seqlens of no entry": ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ValueError, r"\[documents \+ 1\]"),
    "cu_seqlens elsewhere": ({"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}, ValueError, "cu_seqlens is on meta"),
    "cu_seqlens beyond the tokens": ({"cu_seqlens": torch.tensor([0, T + 1], dtype=torch.int32)}, ValueError, "cu_seqlens"),
    "cu_seqlens decreasing": ({"cu_seqlens": torch.tensor([0, 20, 10], dtype=torch.int32)}, ValueError, "cu_seqlens"),
    "cu_seqlens not from 0": ({"cu_seqlens": torch.tensor([1, T], dtype=torch.int32)}, ValueError, "cu_seqlens"),
    "window of one": ({"window": 5}, ValueError, "two integers"),
    "window below -1": ({"window": (-2, 0)}, ValueError, "-1 for unlimited"),
    "window beyond 64 bits": ({"window": (2**70, 0)}, ValueError, "integers"),
    "window of floats": ({"window": (1.0, 0)}, ValueError, "integers"),
    "scale 0": ({"scale": 0}, ValueError, "positive"),
    "negative scale": ({"scale": -0.1}, ValueError, "positive"),
    "NaN scale": ({"scale": float("nan")}, ValueError, "positive"),
    "a scale that rounds to the default": ({"scale": 1e-50}, ValueError, r"1e-50.*2\^-100"),
    "a scale beyond float": ({"scale": 1e39}, ValueError, r"1e\+39"),
    "infinite scale": ({"scale": float("inf")}, ValueError, "positive"),
    "scale as text": ({"scale": "0.1"}, TypeError, "number"),
    "causal as None": ({"causal": None}, TypeError, "causal is a NoneType"),
    "causal as a number": ({"causal": 2}, TypeError, "causal is a int"),
    "scale as bool": ({"scale": True}, TypeError, "bool"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_input(bad: str, requires_grad: bool) -> None:
    changes, exception, words = BAD[bad]
    arguments = good() | changes
    if requires_grad:
        arguments["v"] = arguments["v"].clone().requires_grad_() if arguments["v"].is_floating_point() else arguments["v"]
    with pytest.raises(exception, match=words):
        flamia.attention(**arguments)


WRONG_LENGTHS = {"ends at 51, beyond the 50 tokens": [0, 20, T + 1], "falls from 30 to 20 at document 1": [0, 30, 20],
                 "starts at -2147483648": [-(2**31), T], "starts at 1": [1, T]}


@pytest.mark.parametrize("words", WRONG_LENGTHS)
def test_debugging_names_the_wrong_length(words: str) -> None:
    """What FLAMIA_DEBUG and set_debug check on a GPU; the check reads tensors of any device."""
    with pytest.raises(ValueError, match=words):
        _checks.check_lengths(torch.tensor(WRONG_LENGTHS[words], dtype=torch.int32), T)
    flamia.set_debug(True)
    try:
        with pytest.raises(ValueError, match=words):
            flamia.attention(**good() | {"cu_seqlens": torch.tensor(WRONG_LENGTHS[words], dtype=torch.int32)})
        assert torch.equal(flamia.attention(**good()), flamia.attention(**good()))
    finally:
        flamia.set_debug(False)
    for right in ([0], [0, 0, T - 3], [0, T]):
        _checks.check_lengths(torch.tensor(right, dtype=torch.int32), T)


def test_the_good_input_is_good() -> None:
    """What `test_bad_input` changes works unchanged."""
    assert bool(flamia.attention(**good()).isfinite().all())


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError):
        flamia.attention(**good(), dropout=0.1)
