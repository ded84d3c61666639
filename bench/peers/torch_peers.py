# SPDX-License-Identifier: Apache-2.0
"""Peers that PyTorch ships: cuDNN through SDPA (equal lengths only) and its packed attention."""
from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F

from common import Absent, Inputs, Measurement, median_ms


def cudnn_bf16(x: Inputs, mode: str) -> Measurement:
    """cuDNN BF16, batched [documents, heads, length, d]; needs equal lengths."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    if not x.equal_lengths:
        raise Absent("takes batches of equal lengths only")
    shape = (len(x.lengths), x.longest)

    def batched(t: torch.Tensor) -> torch.Tensor:
        return t.view(*shape, *t.shape[1:]).transpose(1, 2)

    q, k, v = (batched(t).detach().requires_grad_() for t in (x.q, x.k, x.v))
    grouped = x.q.shape[1] != x.k.shape[1]

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=x.causal, enable_gqa=grouped)

    out, grad = forward(), batched(x.dout)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    with torch.no_grad():
        forward_ms = median_ms(forward, mode)
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (out.detach(), *backward())]
    return Measurement(forward_ms, median_ms(backward, mode), rows)


def varlen(x: Inputs, mode: str) -> Measurement:
    """torch.nn.attention.varlen: packed, BF16."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Absent(f"this PyTorch has no torch.nn.attention.varlen ({error})") from error
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, object] = {}
    if "is_causal" in known:
        options["is_causal"] = x.causal
    else:
        options["window_size"] = (-1, 0) if x.causal else (-1, -1)
    if x.q.shape[1] != x.k.shape[1]:
        if "enable_gqa" not in known:
            raise Absent("this PyTorch's varlen_attn has no grouped heads")
        options["enable_gqa"] = True
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))

    def forward() -> torch.Tensor:
        return varlen_attn(q, k, v, x.cu, x.cu, x.longest, x.longest, **options)

    out = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), x.dout, retain_graph=True)

    with torch.no_grad():
        forward_ms = median_ms(forward, mode)
    return Measurement(forward_ms, median_ms(backward, mode), [out.detach(), *backward()])
