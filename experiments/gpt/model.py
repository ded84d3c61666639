# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT on packed documents: pre-norm, rotary positions, GELU MLP of four widths, no biases, no dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from registry import Attention

VOCABULARY = 256  # bytes; byte 0 stands before every document


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 1024
    head_dim: int = 128
    context: int = 1024       # tokens of a packed row; positions are below it
    qk_norm: bool = False     # RMS norm of q and k per head, before the rotation
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.width % self.head_dim != 0 or self.head_dim % 2 != 0:
            raise ValueError(f"width {self.width} must be a multiple of head_dim {self.head_dim}, and head_dim even")

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim ** -0.5


def rotary_table(config: Config) -> Tensor:
    """float32 [context, 2, head_dim / 2]: cosine and sine of every position."""
    half = config.head_dim // 2
    frequency = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns the channel pairs (c, c + head_dim / 2) of x [tokens, heads, head_dim], in float32.

    turn: float32 [tokens, 2, head_dim / 2], cosine and sine.
    """
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = turn[:, 0, None], turn[:, 1, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(config.head_dim), nn.RMSNorm(config.head_dim)

    def forward(self, x: Tensor, turn: Tensor, cu_seqlens: Tensor, attention: Attention) -> Tensor:
        """x [tokens, width] float32, the residual stream; turn as in `rotate`."""
        heads = self.qkv(self.attention_norm(x)).view(x.shape[0], 3, self.config.heads, self.config.head_dim)
        q, k, v = heads.unbind(1)
        if self.config.qk_norm:
            q, k = self.q_norm(q.float()).to(v.dtype), self.k_norm(k.float()).to(v.dtype)
        q, k = rotate(q, turn), rotate(k, turn)
        x = x + self.project(attention(q, k, v, cu_seqlens, self.config.scale).flatten(1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, attention: Attention) -> Tensor:
        """tokens, positions: int64 [tokens]; positions count from the start of each document. Logits [tokens, 256]."""
        x = self.embedding(tokens)
        turn = self.rotary[positions]
        for block in self.blocks:
            x = block(x, turn, cu_seqlens, attention)
        return self.head(self.norm(x))


def loss(model: GPT, tokens: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor, attention: Attention) -> Tensor:
    """Mean cross-entropy over all tokens, in nats per byte; float32 scalar."""
    return F.cross_entropy(model(tokens, positions, cu_seqlens, attention).float(), targets)
