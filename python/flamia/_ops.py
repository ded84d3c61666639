# SPDX-License-Identifier: Apache-2.0
"""The ops flamia::attn_forward and flamia::attn_backward.

    attn_forward(q, k, v, cu_seqlens, recipe, causal, window_left, window_right, scale, deterministic, training)
        -> (out, lse, saved)
    attn_backward(d_out, out, cu_seqlens, saved, key_heads, recipe, causal, window_left, window_right, scale, deterministic)
        -> (d_q, d_k, d_v)

    q, d_q             [tokens, query_heads, head_dim], bfloat16, float16 or float32; contiguous channels
    k, v, d_k, d_v     [tokens, key_heads, head_dim]
    cu_seqlens         int32 [documents + 1]
    out, d_out         as q. out is bfloat16 for bfloat16 input and on a GPU, else float32 (the library writes no float16)
    lse                float32 [query_heads, tokens], natural logarithm; +inf for a row that sees no key. It has no gradient
    saved              uint8 [bytes of the plan]: codes, scales and row statistics; empty without `training`
    d_q, d_k, d_v      in the dtype of out
    recipe             a text that flamia.Recipe reads
    scale              of the scores; 0 = 1 / sqrt(head_dim)

`saved` and the workspace are tensors: on a GPU torch's caching allocator owns them, and a CUDA graph can hold them. No op reads
cu_seqlens on the host for CUDA tensors, and none knows a longest length.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, sizeof
from typing import Any

import torch
from torch import Tensor

from . import _library
from ._checks import check_backward, check_forward, check_lengths
from ._library import lib
from ._plan import Call, Plan, plan

Outputs = tuple[Tensor, Tensor, Tensor]

watcher: Any = None  # health.Watch while flamia.watch is active
debug = os.environ.get("FLAMIA_DEBUG", "0") not in ("", "0")


def set_debug(enabled: bool) -> None:
    """Checks the values of cu_seqlens in every call on a GPU too (on the CPU they always are), and raises ValueError. Waits for the GPU
    in every call. Without it wrong lengths on a GPU are made safe (docs/documents.md), not reported. FLAMIA_DEBUG=1 in the environment
    does the same from the start."""
    global debug
    debug = bool(enabled)


_OPS = torch.library.Library("flamia", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPS.define("attn_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, str recipe, bool causal, int window_left, "
            "int window_right, float scale, bool deterministic, bool training) -> (Tensor out, Tensor lse, Tensor saved)", tags=_TAGS)
_OPS.define("attn_backward(Tensor d_out, Tensor out, Tensor cu_seqlens, Tensor saved, SymInt key_heads, str recipe, bool causal, "
            "int window_left, int window_right, float scale, bool deterministic) -> (Tensor d_q, Tensor d_k, Tensor d_v)", tags=_TAGS)

_DTYPES = {torch.float32: _library.F32, torch.float16: _library.F16, torch.bfloat16: _library.BF16}


def _out_dtype(x: Tensor) -> torch.dtype:
    """Of the output for q, and of gradients for an output."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 or x.device.type == "cuda" else torch.float32


# ---- memory ----

def _buffer(size: int, device: torch.device) -> Tensor:
    """uint8 [size], aligned as the library asks."""
    if device.type == "cuda" or size == 0:
        return torch.empty(size, dtype=torch.uint8, device=device)
    # torch aligns less on the CPU. A view of a larger tensor would do, but an op must not return one: it would have an offset that
    # the fake op cannot know. Whole pages are also zero, so the bytes between the parts of `saved` are the same in every call.
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _aligned(saved: Tensor) -> Tensor:
    """`saved`, or a copy where something in between (offloading, a clone) has moved it to other memory."""
    if saved.numel() == 0 or (saved.is_contiguous() and saved.data_ptr() % _library.BUFFER_ALIGNMENT == 0):
        return saved
    return _buffer(saved.numel(), saved.device).copy_(saved)


def _readable(x: Tensor) -> Tensor:
    """x, or a dense copy: of gradients with strided channels, of expanded tensors (to the library a stride of 0 means dense), and of what
    a GPU cannot load 16 bytes at a time."""
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    if (x.shape[2] > 1 and x.stride(2) != 1) or 0 in strides:
        return x.contiguous()
    if x.is_cuda and (x.data_ptr() % 16 != 0 or any(s != 1 and s * x.element_size() % 16 != 0 for s in strides)):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _view(x: Tensor) -> _library.Tensor:
    token_stride, head_stride = (s if n > 1 else 0 for n, s in zip(x.shape[:2], x.stride()[:2], strict=True))
    return _library.Tensor(x.data_ptr(), _DTYPES[x.dtype], 0, token_stride, head_stride)


# ---- calls ----

def _on(device: torch.device) -> AbstractContextManager[Any]:
    # fake CUDA tensors exist before CUDA, and without a GPU
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_initialized() else nullcontext()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _plan(x: Tensor, cu_seqlens: Tensor, key_heads: int, *, recipe: str, causal: bool, left: int, right: int, scale: float,
          deterministic: bool, training: bool) -> Plan:
    """x: q or out."""
    cuda = x.device.type == "cuda"
    tokens, query_heads, head_dim = x.shape
    call = Call(tokens, cu_seqlens.shape[0] - 1, query_heads, key_heads, head_dim, causal, left, right, scale, recipe,
                "cuda" if cuda else "cpu", x.device.index or 0 if cuda else 0, 0 if cuda else torch.get_num_threads(),
                deterministic, training)
    with _on(x.device):
        return plan(call)


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: str, causal: bool, window_left: int, window_right: int,
             scale: float, deterministic: bool, training: bool) -> Outputs:
    check_forward(q, k, v, cu_seqlens)
    made = _plan(q, cu_seqlens, k.shape[1], recipe=recipe, causal=causal, left=window_left, right=window_right, scale=scale,
                 deterministic=deterministic, training=training)
    if debug:
        check_lengths(cu_seqlens, q.shape[0])
    q, k, v, cu_seqlens = _readable(q), _readable(k), _readable(v), cu_seqlens.contiguous()
    out = torch.empty(q.shape, dtype=_out_dtype(q), device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    saved = _buffer(made.saved_bytes, q.device)
    workspace = _buffer(made.forward_bytes, q.device)
    args = _library.ForwardArgs(sizeof(_library.ForwardArgs), _view(q), _view(k), _view(v), cu_seqlens.data_ptr(), _view(out),
                                lse.data_ptr(), saved.data_ptr(), saved.numel(), workspace.data_ptr(), workspace.numel(),
                                _stream(q.device))
    with _on(q.device):
        _library.check(lib.flamia_attention_forward(made.handle, byref(args)))
    if watcher is not None:
        watcher._forward(q, k, v, cu_seqlens, saved, {"recipe": recipe, "causal": causal, "window": (window_left, window_right),
                                                      "scale": scale})
    return out, lse, saved


def _backward(d_out: Tensor, out: Tensor, cu_seqlens: Tensor, saved: Tensor, key_heads: int, recipe: str, causal: bool,
              window_left: int, window_right: int, scale: float, deterministic: bool) -> Outputs:
    check_backward(d_out, out, cu_seqlens, saved)
    made = _plan(out, cu_seqlens, key_heads, recipe=recipe, causal=causal, left=window_left, right=window_right, scale=scale,
                 deterministic=deterministic, training=True)
    if watcher is not None:
        watcher._backward(d_out, saved)
    d_out, out, cu_seqlens, saved = _readable(d_out), _readable(out), cu_seqlens.contiguous(), _aligned(saved)
    d_q = torch.empty(out.shape, dtype=_out_dtype(out), device=out.device)
    d_k, d_v = (d_q.new_empty((out.shape[0], key_heads, out.shape[2])) for _ in range(2))
    workspace = _buffer(made.backward_bytes, out.device)
    args = _library.BackwardArgs(sizeof(_library.BackwardArgs), _view(out), _view(d_out), cu_seqlens.data_ptr(), _view(d_q),
                                 _view(d_k), _view(d_v), saved.data_ptr(), saved.numel(), workspace.data_ptr(), workspace.numel(),
                                 _stream(out.device))
    with _on(out.device):
        _library.check(lib.flamia_attention_backward(made.handle, byref(args)))
    return d_q, d_k, d_v


for _device in ("CPU", "CUDA"):
    _OPS.impl("attn_forward", _forward, _device)
    _OPS.impl("attn_backward", _backward, _device)


# ---- shapes ----

def _saved_size(q: Tensor, k: Tensor, cu_seqlens: Tensor, **fields: Any) -> int | torch.SymInt:
    """Bytes of `saved`. With symbolic shapes they are a size of their own, known when the op has run: a plan needs numbers."""
    if any(isinstance(size, torch.SymInt) for size in (*q.shape, k.shape[1], cu_seqlens.shape[0])):
        return torch.library.get_ctx().new_dynamic_size() if fields["training"] else 0
    return _plan(q, cu_seqlens, k.shape[1], **fields).saved_bytes


@torch.library.register_fake("flamia::attn_forward", lib=_OPS)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: str, causal: bool, window_left: int,
                  window_right: int, scale: float, deterministic: bool, training: bool) -> Outputs:
    check_forward(q, k, v, cu_seqlens)
    size = _saved_size(q, k, cu_seqlens, recipe=recipe, causal=causal, left=window_left, right=window_right, scale=float(scale),
                       deterministic=deterministic, training=training)
    return (q.new_empty(q.shape, dtype=_out_dtype(q)), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32),
            q.new_empty((size,), dtype=torch.uint8))


@torch.library.register_fake("flamia::attn_backward", lib=_OPS)
def _backward_fake(d_out: Tensor, out: Tensor, cu_seqlens: Tensor, saved: Tensor, key_heads: int, recipe: str, causal: bool,
                   window_left: int, window_right: int, scale: float, deterministic: bool) -> Outputs:
    check_backward(d_out, out, cu_seqlens, saved)
    d_q = out.new_empty(out.shape, dtype=_out_dtype(out))
    d_k, d_v = (d_q.new_empty((out.shape[0], key_heads, out.shape[2])) for _ in range(2))
    return d_q, d_k, d_v


# ---- gradients ----

def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, _, cu_seqlens, *ctx.fields, training = inputs
    out, lse, saved = output
    ctx.mark_non_differentiable(lse, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, cu_seqlens, saved)
    ctx.key_heads, ctx.dtype, ctx.training = k.shape[1], q.dtype, training


def _differentiate(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 8  # cu_seqlens to training
    if d_out is None:
        return (None, None, None, *nothing)
    if not ctx.training:
        raise RuntimeError("flamia::attn_forward ran with training=False and so kept nothing for a backward pass; call it with "
                           "training=True")
    out, cu_seqlens, saved = ctx.saved_tensors
    gradients = torch.ops.flamia.attn_backward(d_out, out, cu_seqlens, saved, ctx.key_heads, *ctx.fields)
    return (*(g.to(ctx.dtype) for g in gradients), *nothing)


torch.library.register_autograd("flamia::attn_forward", _differentiate, setup_context=_save, lib=_OPS)


def _differentiate_twice(ctx: Any, *_: Tensor) -> tuple[None, ...]:
    raise RuntimeError("flamia attention cannot be differentiated twice: its backward pass has no backward pass. Leave create_graph "
                       "at False, or use exact attention for second derivatives")


torch.library.register_autograd("flamia::attn_backward", _differentiate_twice, lib=_OPS)


# ---- autocast ----

def _autocast(device: str) -> None:
    """Under autocast the op takes bfloat16, whatever dtype autocast has: the library writes no float16."""
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Outputs:
        with torch.autocast(device, enabled=False):
            return torch.ops.flamia.attn_forward(*(x.to(torch.bfloat16) for x in (q, k, v)), *rest)
    _OPS.impl("attn_forward", forward, f"Autocast{device.upper()}")


_autocast("cpu")
_autocast("cuda")

# For torch.utils.checkpoint.create_selective_checkpoint_contexts: what is worth keeping when activations are recomputed.
SAVEABLE_OPS = (torch.ops.flamia.attn_forward.default,)
