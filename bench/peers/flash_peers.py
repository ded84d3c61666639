# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's kernels from wheels: FA3 BF16 through XLA targets, FA3 FP8 forward, FA4."""
from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import statistics
import time
from typing import Callable

import torch

from common import DEVICE, Absent, Inputs, Measurement, median_ms


@functools.cache
def _fa3_library() -> None:
    """Registers FA3's packed XLA targets from dew-flash-attn-cu13; FA3_LIBRARY may name libdew_flash_attn3.so itself."""
    try:
        import jax
    except ImportError as error:
        raise Absent(f"needs jax ({error})") from error
    path = os.environ.get("FA3_LIBRARY")
    if path is None:
        package = importlib.util.find_spec("dew_flash_attn")
        if package is None or not package.submodule_search_locations:
            raise Absent("dew-flash-attn-cu13 is not installed and FA3_LIBRARY is not set")
        path = os.path.join(package.submodule_search_locations[0], "libdew_flash_attn3.so")
    jax.devices("gpu")
    library = ctypes.cdll.LoadLibrary(path)
    for name in ("dew_flash3_mha_varlen_fwd", "dew_flash3_mha_varlen_bwd"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")


def _host_timed(call: Callable[[], object], mode: str) -> float:
    """JAX owns its stream: batches of launches against the host clock, so that the launch gap does not count."""
    import jax
    jax.block_until_ready(call())
    batch, series = (6, 7) if mode == "burst" else (20, 5)
    times = []
    for _ in range(series):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(batch)])
        times.append((time.perf_counter() - start) * 1e3 / batch)
    return statistics.median(times)


def fa3(x: Inputs, mode: str) -> Measurement:
    """FlashAttention-3, packed, BF16, the bare kernels forward and backward."""
    _fa3_library()
    import jax
    import jax.numpy as jnp
    import numpy as np
    shape = jax.ShapeDtypeStruct
    q, k, v, g, cu = (jax.dlpack.from_dlpack(t.contiguous()) for t in (x.q, x.k, x.v, x.dout, x.cu))
    tokens, heads, documents = q.shape[0], q.shape[1], len(x.lengths)
    options = dict(softmax_scale=np.float64(q.shape[2]**-0.5), is_causal=x.causal, window_size_left=np.int64(-1),
                   window_size_right=np.int64(-1), max_seqlen=np.int64(x.longest), max_seqlen_k=np.int64(x.longest))
    scratch = shape((heads * (tokens + 128 * (documents + 1)),), jnp.float32)
    lse_shape = shape((heads, tokens), jnp.float32)
    forward_call = jax.ffi.ffi_call("dew_flash3_mha_varlen_fwd", (shape(q.shape, q.dtype), lse_shape,
                                                                  shape((1, 1, 1, 1), jnp.float32), shape((1, 1, 1), jnp.float32)))
    backward_call = jax.ffi.ffi_call("dew_flash3_mha_varlen_bwd", (shape(q.shape, q.dtype), shape(k.shape, k.dtype),
                                                                   shape(v.shape, v.dtype), scratch, scratch))
    run_forward = jax.jit(lambda q, k, v, cu: forward_call(q, k, v, cu, cu, **options)[:2])
    run_backward = jax.jit(lambda g, q, k, v, o, l, cu: backward_call(g, q, k, v, o, l, cu, cu, **options)[:3])
    out, lse = run_forward(q, k, v, cu)
    grads = run_backward(g, q, k, v, out, lse, cu)
    return Measurement(_host_timed(lambda: run_forward(q, k, v, cu), mode),
                       _host_timed(lambda: run_backward(g, q, k, v, out, lse, cu), mode),
                       [torch.from_dlpack(t) for t in (out, *grads)])


def fa3_fp8(x: Inputs, mode: str) -> Measurement:
    """FlashAttention-3 FP8 forward, packed; input already E4M3 (the cast is not timed), scales 1."""
    try:
        from fa3_fwd_interface import flash_attn_varlen_func
    except ImportError as error:
        raise Absent(f"fa3-fwd is not installed ({error})") from error
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v))
    one = torch.ones(len(x.lengths), x.k.shape[1], device=DEVICE, dtype=torch.float32)

    def forward() -> torch.Tensor:
        result = flash_attn_varlen_func(q, k, v, x.cu, x.cu, x.longest, x.longest, causal=x.causal, q_descale=one, k_descale=one,
                                        v_descale=one)
        return result[0] if isinstance(result, tuple) else result

    return Measurement(median_ms(forward, mode), None, [forward()])


def fa4(x: Inputs, mode: str) -> Measurement:
    """FlashAttention-4 (CuTe), packed, BF16."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Absent(f"flash-attn-4 is not installed ({error})") from error
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))

    def forward() -> torch.Tensor:
        result = flash_attn_varlen_func(q, k, v, cu_seqlens_q=x.cu, cu_seqlens_k=x.cu, max_seqlen_q=x.longest,
                                        max_seqlen_k=x.longest, causal=x.causal)
        return result[0] if isinstance(result, tuple) else result

    out = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), x.dout, retain_graph=True)

    with torch.no_grad():
        forward_ms = median_ms(forward, mode)
    return Measurement(forward_ms, median_ms(backward, mode), [out.detach(), *backward()])


def flashinfer(x: Inputs, mode: str) -> Measurement:
    """FlashInfer's packed prefill, its kernel for Hopper (compiled at first use unless cut_flashinfer.py did); planned once, not timed."""
    try:
        import flashinfer as package
    except ImportError as error:
        raise Absent(f"flashinfer-python is not installed ({error})") from error
    space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa3")
    wrapper.plan(x.cu, x.cu, x.q.shape[1], x.k.shape[1], x.q.shape[2], causal=x.causal, q_data_type=x.q.dtype)
    return Measurement(median_ms(lambda: wrapper.run(x.q, x.k, x.v), mode), None, [wrapper.run(x.q, x.k, x.v)])
