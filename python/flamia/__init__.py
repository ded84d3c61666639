# SPDX-License-Identifier: Apache-2.0
"""flamia: attention for training with 8-bit and 4-bit operands.

    attention                 packed documents or a batch, any recipe
    flash_attn_func           the signatures of flash-attn
    flash_attn_varlen_func
    Recipe                    which numbers attention computes with
    SAVEABLE_OPS              ops that activation checkpointing should keep
    set_debug                 wrong lengths on a GPU raise
    stats, watch              what quantisation did to the operands, to log while a model trains

flamia.huggingface and flamia.torchtitan put it into those libraries.
"""

import torch as _torch

from ._library import version as _version
from ._ops import SAVEABLE_OPS, set_debug
from .flash import flash_attn_func, flash_attn_varlen_func
from .functional import attention
from .health import stats, watch
from .recipe import Recipe

# a checkpoint that holds a Recipe can be read with torch.load(..., weights_only=True)
_torch.serialization.add_safe_globals([Recipe])

__version__ = _version()
__all__ = ["SAVEABLE_OPS", "Recipe", "attention", "flash_attn_func", "flash_attn_varlen_func", "set_debug", "stats", "watch"]
