# SPDX-License-Identifier: Apache-2.0
"""The signatures of flash-attn 2 and 3."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import flamia  # noqa: E402
from flamia import flash_attn_func, flash_attn_varlen_func  # noqa: E402

FA2 = "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
FA2_VARLEN = ("q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
              "alibi_slopes deterministic return_attn_probs block_table")
FA3 = "qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa sm_margin"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-2]))


def packed():
    return draw(60, 4, 32), draw(60, 2, 32), draw(60, 2, 32), torch.tensor([0, 25, 60], dtype=torch.int32)


def batch():
    return draw(2, 30, 4, 32), draw(2, 30, 2, 32), draw(2, 30, 2, 32)


def test_signatures() -> None:
    for function, positional in ((flash_attn_func, FA2), (flash_attn_varlen_func, FA2_VARLEN)):
        parameters = inspect.signature(function).parameters
        names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert names == positional.split() and set(FA3.split()) <= set(parameters)


def test_same_as_attention() -> None:
    q, k, v, cu = packed()
    for causal in (False, True):
        for window in ((-1, -1), (7, 0)):
            a = flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, 0.0, 0.2, causal, window)
            assert torch.equal(a, flamia.attention(q, k, v, cu, causal=causal, window=window, scale=0.2))
    q, k, v = batch()
    assert torch.equal(flash_attn_func(q, k, v, 0.0, 0.2, True), flamia.attention(q, k, v, scale=0.2))
    assert torch.equal(flash_attn_func(q, k, v, recipe="bf16"), flamia.attention(q, k, v, causal=False, recipe="bf16"))


def test_longest_lengths_are_not_needed() -> None:
    q, k, v, cu = packed()
    a = flash_attn_varlen_func(q, k, v, cu, cu, 35, 35)
    assert torch.equal(a, flash_attn_varlen_func(q, k, v, cu, cu))
    assert torch.equal(a, flash_attn_varlen_func(q, k, v, cu, cu, torch.tensor(35), 1))
    with pytest.raises(TypeError, match="max_seqlen_q is a str"):
        flash_attn_varlen_func(q, k, v, cu, cu, "35", 35)


def test_two_cu_seqlens_must_agree() -> None:
    q, k, v, cu = packed()
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu, cu.clone()), flash_attn_varlen_func(q, k, v, cu, cu))
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k differ"):
        flash_attn_varlen_func(q, k, v, cu, torch.tensor([0, 26, 60], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn_varlen_func(q, k, v, cu, cu[:2])
    with pytest.raises(TypeError, match="cu_seqlens_q is a NoneType"):
        flash_attn_varlen_func(q, k, v, None, cu)


TENSOR = torch.ones(4)
UNSUPPORTED = {"dropout_p": 0.1, "softcap": 30.0, "alibi_slopes": TENSOR, "return_attn_probs": True, "qv": TENSOR, "q_descale": TENSOR,
               "k_descale": TENSOR, "v_descale": TENSOR, "attention_chunk": 16, "num_splits": 2, "pack_gqa": True, "sm_margin": 8}
VARLEN_ONLY = {"block_table": TENSOR, "seqused_q": TENSOR, "seqused_k": TENSOR}


@pytest.mark.parametrize("name", [*UNSUPPORTED, *VARLEN_ONLY])
def test_unsupported_arguments_are_refused(name: str) -> None:
    value = (UNSUPPORTED | VARLEN_ONLY)[name]
    q, k, v, cu = packed()
    with pytest.raises(NotImplementedError, match=f"{name} is .*which flamia does not implement"):
        flash_attn_varlen_func(q, k, v, cu, cu, **{name: value})
    if name in UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=f"{name} is .*which flamia does not implement"):
            flash_attn_func(*batch(), **{name: value})


def test_neutral_values_pass() -> None:
    neutral = dict(dropout_p=0, softcap=0.0, alibi_slopes=None, return_attn_probs=False, qv=None, q_descale=None, k_descale=None,
                   v_descale=None, attention_chunk=0, num_splits=0, pack_gqa=None, sm_margin=0, deterministic=True)
    assert torch.equal(flash_attn_func(*batch(), **neutral), flash_attn_func(*batch()))


def test_positions_of_flash_attn_3_are_not_misread() -> None:
    """There softmax_scale comes where dropout_p is here, and seqused_q in the varlen function."""
    q, k, v, cu = packed()
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_func(*batch(), 0.2, True)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_func(*batch(), None, True)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, cu)


def test_shapes_of_the_other_function() -> None:
    q, k, v, cu = packed()
    with pytest.raises(ValueError, match="flash_attn_varlen_func"):
        flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="flash_attn_func"):
        flash_attn_varlen_func(*batch(), cu, cu)
    q, k, v = batch()
    with pytest.raises(ValueError, match="KV cache"):
        flash_attn_func(q[:, -1:], k, v)
