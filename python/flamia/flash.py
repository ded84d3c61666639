# SPDX-License-Identifier: Apache-2.0
"""The functions of flash-attn under their own names and signatures.

Positions are those of flash-attn 2; what flash-attn 3 adds follows as keywords. An argument that flamia does not implement raises
NotImplementedError unless it has the value that changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .functional import attend
from .recipe import Recipe

# argument: (values that change nothing, why there is no other)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dropout_p": ((0,), "there is no dropout of attention probabilities; pass 0.0"),
    "softcap": ((0,), "scores are not capped; pass 0.0"),
    "alibi_slopes": ((None,), "there are no position biases; use rotary positions"),
    "return_attn_probs": ((False,), "the probabilities are never formed; for the log-sum-exp call flamia.attention with return_lse=True"),
    "block_table": ((None,), "there is no paged KV cache; flamia is for training"),
    "seqused_q": ((None,), "let cu_seqlens end where the documents end, or pack the tokens"),
    "seqused_k": ((None,), "let cu_seqlens end where the documents end, or pack the tokens"),
    "qv": ((None,), "there is no second query operand"),
    "q_descale": ((None,), "inputs are bfloat16, float16 or float32 and are scaled inside, as the recipe says"),
    "k_descale": ((None,), "inputs are bfloat16, float16 or float32 and are scaled inside, as the recipe says"),
    "v_descale": ((None,), "inputs are bfloat16, float16 or float32 and are scaled inside, as the recipe says"),
    "attention_chunk": ((0,), "there is no chunked attention; use window_size, or cut the documents with cu_seqlens"),
    "num_splits": ((0, 1), "keys are never split over blocks; pass 1"),
    "pack_gqa": ((None,), "the kernel decides how query heads share a key head; pass None"),
    "sm_margin": ((0,), "the kernel takes the whole GPU; pass 0"),
}


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        neutral, why = _UNSUPPORTED[name]
        # no ==: it would compare tensors element by element
        if isinstance(value, Tensor) or not any(value is n or (type(value) in (int, float) and n is not None and value == n)
                                                for n in neutral):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {shown}, which flamia does not implement: {why}")


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
                    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 1, pack_gqa: bool | None = None,
                    sm_margin: int = 0, recipe: str | Recipe = "mxfp8") -> Tensor:
    """flash_attn.flash_attn_func: q [batch, tokens, query_heads, head_dim], k and v [batch, tokens, key_heads, head_dim].

    Returns out like q. `recipe` is flamia's own; see flamia.attention for the rest, the errors and the dtypes.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs, qv=qv,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits,
            pack_gqa=pack_gqa, sm_margin=sm_margin)
    if isinstance(q, Tensor) and q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)} but must be [batch, tokens, heads, head_dim]; packed documents go to "
                         "flash_attn_varlen_func")
    return attend(q, k, v, None, causal=causal, window=window_size, scale=softmax_scale, recipe=recipe,
                  deterministic=deterministic)[0]


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None,
                           dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
                           seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, qv: Tensor | None = None,
                           q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                           attention_chunk: int = 0, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
                           recipe: str | Recipe = "mxfp8") -> Tensor:
    """flash_attn.flash_attn_varlen_func: q [tokens, query_heads, head_dim], k and v [tokens, key_heads, head_dim], packed.

    cu_seqlens_q and cu_seqlens_k must hold the same int32 numbers; if they are two tensors this is checked (on a GPU asserted, without
    waiting for it). max_seqlen_q and max_seqlen_k have no influence: flamia needs no longest length. Returns out like q. `recipe` is flamia's
    own; see flamia.attention for the rest, the errors and the dtypes.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs,
            block_table=block_table, seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    for name, x in (("q", q), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__} but must be a torch.Tensor")
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)} but must be [tokens, heads, head_dim]; a batch goes to flash_attn_func")
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(length, bool) or not isinstance(length, (int, Tensor, torch.SymInt, type(None))):
            raise TypeError(f"{name} is a {type(length).__name__} but must be an integer or None")
    if cu_seqlens_k is not cu_seqlens_q:
        if cu_seqlens_k.shape != cu_seqlens_q.shape or cu_seqlens_k.device != cu_seqlens_q.device:
            raise ValueError(f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} on {cu_seqlens_q.device} and cu_seqlens_k "
                             f"{tuple(cu_seqlens_k.shape)} on {cu_seqlens_k.device}; they must be the same: flamia is for training and "
                             "has no KV cache and no cross-attention")
        differ = "cu_seqlens_q and cu_seqlens_k differ; flamia has no KV cache and no cross-attention, so pass one tensor as both"
        if type(cu_seqlens_q) is Tensor and cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling():
            if not torch.equal(cu_seqlens_q, cu_seqlens_k):
                raise ValueError(differ)
        else:
            torch._assert_async((cu_seqlens_k == cu_seqlens_q).all(), differ)
    return attend(q, k, v, cu_seqlens_q, causal=causal, window=window_size, scale=softmax_scale, recipe=recipe,
                  deterministic=deterministic)[0]
