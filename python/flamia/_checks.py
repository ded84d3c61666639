# SPDX-License-Identifier: Apache-2.0
"""What the ops refuse. Shared by the real and the fake implementations, so that torch.compile reports the same errors."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cpu", "cuda", "meta")
MOST_TOKENS = 2**31 - 1  # cu_seqlens is int32


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(str(size) for size in x.shape) + "]"


def check_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    """Raises TypeError for dtypes, ValueError for shapes, devices and strides. Head dim, mask, scale and recipe are the plan's."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {_shape(x)} but must be [tokens, heads, head_dim]")
        if x.device.type not in DEVICES:
            raise ValueError(f"{name} is on {x.device}; flamia attends tensors on cpu and cuda, so move q, k and v there")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype} but must be bfloat16, float16 or float32; quantisation happens inside")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} and q {q.dtype}; q, k and v have one dtype, so convert one of them")
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(f"{name} has strides {tuple(x.stride())}: its channels are not contiguous; call {name}.contiguous() "
                             "(views that are strided along tokens and heads work as they are)")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {_shape(k)} and v {_shape(v)}; they must be the same")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} tokens and k {k.shape[0]}; flamia is for training, where every token has a query "
                         "and a key. It has no KV cache and no cross-attention")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]} and k {k.shape[2]}; they must be the same")
    if not isinstance(q.shape[0], torch.SymInt) and q.shape[0] > MOST_TOKENS:
        raise ValueError(f"q has {q.shape[0]} tokens but cu_seqlens, being int32, counts {MOST_TOKENS}; attend fewer per call")
    check_cu_seqlens(cu_seqlens, q)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype} but must be int32; call cu_seqlens.to(torch.int32)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {_shape(cu_seqlens)} but must be [documents + 1]: 0, then the end of each document")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move cu_seqlens to {q.device}")


def check_lengths(cu_seqlens: Tensor, tokens: int) -> None:
    """The values of cu_seqlens, for debugging: reads them on the host, so a GPU is waited for; inside a CUDA graph the device asserts."""
    rises = (cu_seqlens.diff() >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= tokens)
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(rises, "cu_seqlens must start at 0, never fall and end at the number of tokens at most")
    elif not bool(rises):
        values = cu_seqlens.tolist()
        fall = next((i for i, (a, b) in enumerate(zip(values, values[1:], strict=False)) if b < a), None)
        what = (f"starts at {values[0]}" if values[0] != 0 else f"falls from {values[fall]} to {values[fall + 1]} at document {fall}"
                if fall is not None else f"ends at {values[-1]}, beyond the {tokens} tokens of q")
        raise ValueError(f"cu_seqlens {what}; it must start at 0, never fall and end at the number of tokens at most")


def check_backward(d_out: Tensor, out: Tensor, cu_seqlens: Tensor, saved: Tensor) -> None:
    """As check_forward, for what autograd hands to the backward op."""
    if out.dim() != 3 or d_out.shape != out.shape:
        raise ValueError(f"d_out has shape {_shape(d_out)} and out {_shape(out)}; both must be [tokens, query_heads, head_dim]")
    for name, x in (("d_out", d_out), ("out", out)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype} but must be bfloat16, float16 or float32")
    for name, x in (("d_out", d_out), ("saved", saved)):
        if x.device != out.device:
            raise ValueError(f"{name} is on {x.device} and out on {out.device}; move them to one device")
    if saved.dtype != torch.uint8 or saved.dim() != 1:
        raise ValueError(f"saved is {saved.dtype} of shape {_shape(saved)} but must be the third result of flamia::attn_forward")
    check_cu_seqlens(cu_seqlens, out)
