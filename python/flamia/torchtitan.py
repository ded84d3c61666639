# SPDX-License-Identifier: Apache-2.0
"""flamia as the inner attention of TorchTitan's language models, in the place of its varlen attention.

    torchrun --nproc_per_node=1 -m torchtitan.train --module flamia.torchtitan --config llama3_1b_mxfp8

`use(config, recipe)` puts it into any configuration of a decoder; `llama3_1b_*` are a Llama 3 model of 1 B parameters at 2048 tokens, one
per recipe that Hopper runs, and `llama3_1b_bf16` is the same with TorchTitan's own attention. Documents come from the data loader's
positions. Written for TorchTitan 0.3. Tensor and context parallelism of the attention were not tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from ._ops import SAVEABLE_OPS
from .functional import attention
from .recipe import Recipe


class FlamiaAttention(VarlenAttention):
    """Its configuration is a VarlenAttention.Config, so that the model builds document boundaries for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        recipe: str = "mxfp8"
        """ The numbers to compute with, as flamia.Recipe reads them: "mxfp8", "mxfp8-exact", "mxfp8 ds=32x32". """

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # not VarlenAttention's, which activates another library's kernels
        self.window_size = config.window_size
        self.recipe = Recipe(config.recipe)  # a wrong name fails before the model is built

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: VarlenMetadata,  # noqa: N803
                scale: float | None = None, out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
                enable_gqa: bool = False) -> Tensor:
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks is a {type(attention_masks).__name__} but must be VarlenMetadata; build this attention from "
                            "FlamiaAttention.Config, in every layer")
        if out_transform is not None:
            raise NotImplementedError("out_transform needs a gradient of the log-sum-exp, which flamia does not have; use a model without "
                                      "attention sinks or gates on it")
        left, right = self.window_size
        causal = right == 0
        q, k, v = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = attention(q, k, v, attention_masks.cu_seq_q, causal=causal, window=(left, -1 if causal else right), scale=scale,
                        recipe=self.recipe)
        return out.view(*q_BLNH.shape[:2], *out.shape[1:]).to(q_BLNH.dtype)


class FlamiaSelectiveAC(SelectiveAC):
    """TorchTitan's selective checkpointing, which keeps the output of its own attention and so must keep flamia's too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | set(SAVEABLE_OPS)


def use(config: Any, recipe: str) -> Any:
    """`config` (a Trainer.Config or a model's) with flamia's attention in every layer; changed in place and returned.

    Selective activation checkpointing of a Trainer.Config then keeps the attention's output as it would keep its own attention's.
    Raises ValueError if it holds an attention that is neither varlen nor FlexAttention.
    """
    Recipe(recipe)
    model = config.model_spec.model if isinstance(config, Trainer.Config) else config
    for layer in model.layers:
        old = layer.attention.inner_attention
        if type(old).__qualname__ not in ("VarlenAttention.Config", "FlexAttention.Config", "FlamiaAttention.Config"):
            raise ValueError(f"a layer has {type(old).__qualname__}, which flamia does not stand in for; build the model with "
                             "attn_backend=\"varlen\"")
        window = getattr(old, "window_size", (-1, 0))
        layer.attention.inner_attention = FlamiaAttention.Config(window_size=window, recipe=recipe)
    if isinstance(config, Trainer.Config) and type(config.activation_checkpoint) is SelectiveAC.Config:
        kept = {f.name: getattr(config.activation_checkpoint, f.name) for f in dataclasses.fields(config.activation_checkpoint)}
        config.activation_checkpoint = FlamiaSelectiveAC.Config(**kept)
    return config


def llama3_1b_bf16() -> Trainer.Config:
    """1.2 B parameters, 2048 tokens, 0.5 M tokens a step on one GPU by accumulation; TorchTitan's varlen attention in BF16."""
    config = llama3_8b()
    config.model_spec = model_registry("1B", attn_backend="varlen")
    config.hf_assets_path = "./assets/hf/Llama-3.2-1B"
    config.training.seq_len = 2048
    config.training.local_batch_size = 16
    config.training.global_batch_size = 256
    config.training.steps = 20000
    config.training.disable_cuda_graphs = True  # the number of documents changes from step to step
    return config


def llama3_1b_mxfp8() -> Trainer.Config:
    return use(llama3_1b_bf16(), "mxfp8")


def llama3_1b_mxfp8_exact() -> Trainer.Config:
    return use(llama3_1b_bf16(), "mxfp8-exact")


def llama3_1b_fp8_tensor() -> Trainer.Config:
    """For comparison: one scale for each tensor, through which later tokens and other documents reach every output."""
    return use(llama3_1b_bf16(), "fp8-tensor")


def llama3_1b_nvfp4() -> Trainer.Config:
    return use(llama3_1b_bf16(), "nvfp4")


def llama3_1b_nvfp4_exact() -> Trainer.Config:
    return use(llama3_1b_bf16(), "nvfp4-exact")


def llama3_1b_sagebwd() -> Trainer.Config:
    """For comparison: SageBwd's INT8, whose scales and means let later tokens reach earlier outputs."""
    return use(llama3_1b_bf16(), "sagebwd")
