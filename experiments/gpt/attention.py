# SPDX-License-Identifier: Apache-2.0
"""Attention as a plug-in: a function chosen by name.

Every attention here has one signature, causal and confined to documents:

    o = attention(q, k, v, cu_seqlens, scale)

    q, k, v, o    [tokens, heads, head_dim], any float dtype
    cu_seqlens    int32 [n + 1], on the same device: document i is tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1; the first
                  value is 0, the last is `tokens`; empty documents are allowed and pad the list to a fixed length
    scale         scores are scale * q.k

`make(name, row)` looks the name up. `row` is the length of a packed row in tokens: no document crosses a multiple of it,
so no document is longer. A name may carry an argument after a colon: `flamia:mxfp8` calls the factory `flamia` with "mxfp8".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import emulation  # noqa: F401 -- registers `emulated:<recipe>`
import flamia_attention  # noqa: F401 -- registers `flamia:<recipe>`
from registry import Attention, make, register

__all__ = ["Attention", "make", "register"]


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise ValueError(f"attention {name!r} takes no argument, but was asked for with {argument!r}; write just {name!r}")


def document_mask(cu_seqlens: Tensor, tokens: int, row: int) -> Tensor:
    """bool [tokens / row, 1, row, row]: may the query (third axis) see the key (last axis)?"""
    position = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, position, right=True).view(-1, row)
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(row, row, dtype=torch.bool, device=cu_seqlens.device).tril()
    return (same & causal)[:, None]


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    rows, row = mask.shape[0], mask.shape[-1]
    q, k, v = (x.view(rows, row, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.transpose(1, 2).flatten(0, 1)


@register("sdpa")
def _sdpa(argument: str, row: int) -> Attention:
    """PyTorch's attention in the dtype of its input, with a dense document mask; runs anywhere."""
    _no_argument("sdpa", argument)

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        return _masked_sdpa(q, k, v, document_mask(cu_seqlens, q.shape[0], row), scale)
    return attention


@register("exact")
def _exact(argument: str, row: int) -> Attention:
    """Float32 scores, softmax and products, by plain matrix products: the yardstick for every other attention."""
    _no_argument("exact", argument)

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        if torch.get_float32_matmul_precision() != "highest":
            raise RuntimeError("attention 'exact' needs torch.set_float32_matmul_precision('highest'); TF32 is not exact")
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(q.device.type, enabled=False):
            mask = document_mask(cu_seqlens, q.shape[0], row)
            return _masked_sdpa(q.float(), k.float(), v.float(), mask, scale).to(q.dtype)
    return attention


@register("varlen")
def _varlen(argument: str, row: int) -> Attention:
    """PyTorch's FlashAttention on packed documents; BF16 or FP16, NVIDIA GPUs."""
    _no_argument("varlen", argument)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise RuntimeError(f"attention 'varlen' needs torch.nn.attention.varlen with `scale` and `window_size` (PyTorch "
                           f"2.11 or later; this is {torch.__version__}); use --attention sdpa here") from error
    if not torch.cuda.is_available():
        raise RuntimeError("attention 'varlen' needs a CUDA GPU and torch sees none; use --attention sdpa here")

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, row, row, scale=scale, window_size=(-1, 0))
    return attention

