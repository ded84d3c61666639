# SPDX-License-Identifier: Apache-2.0
"""`--attention flamia:<recipe>`: this project's attention, for example flamia:mxfp8 or "flamia:mxfp8-exact ds=row32"."""

from __future__ import annotations

from torch import Tensor

from attention import Attention, register


@register("flamia")
def _flamia(argument: str, row: int) -> Attention:
    """Every recipe that trains, on the device of its input; an error where that device does not do it."""
    if not argument:
        raise ValueError("attention 'flamia' needs a recipe, for example --attention flamia:mxfp8")
    try:
        import flamia
    except ImportError as error:
        raise RuntimeError(f"attention 'flamia' needs the flamia package, pip install . in the checkout ({error})") from error
    recipe = flamia.Recipe(argument).name  # a wrong name fails now, not in the first step

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        return flamia.attention(q, k, v, cu_seqlens, scale=scale, recipe=recipe)
    return attention
