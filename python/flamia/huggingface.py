# SPDX-License-Identifier: Apache-2.0
"""flamia as an attention implementation of Hugging Face transformers.

    import flamia.huggingface
    flamia.huggingface.register()                                   # "flamia" computes in mxfp8
    flamia.huggingface.register("flamia-exact", "mxfp8-exact")
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flamia")

Documents are found as flash-attention's integration finds them: cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening with
return_flash_attn_kwargs=True), position_ids that start again, or a padding mask; padding becomes documents of its own. What flamia does
not compute raises: dropout, softcap, attention sinks, position biases, attention weights, a key/value cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .flash import flash_attn_varlen_func
from .functional import attention
from .recipe import Recipe

_ALLOWED: dict[str, str] = {
    "softcap": "scores are not capped; use a model without it",
    "s_aux": "there are no attention sinks; use a model without them",
    "position_bias": "there are no position biases; use rotary positions",
    "head_mask": "heads cannot be masked",
    "output_attentions": "the probabilities are never formed; use attn_implementation=\"eager\" to see them",
    "block_table": "there is no paged cache; flamia is for training",
}


def _causal(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _starts(batch_size: int, length: int, mask_function: Callable[..., Any], padding: Tensor | None, device: torch.device) -> Tensor:
    """bool [batch, length]: does a document start at the token? Where a token may not see the one before it, or padding begins or ends."""
    token = torch.arange(1, length, device=device)[None]
    row, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    back, ahead = (torch.as_tensor(mask_function(row, head, i, j), device=device).expand(batch_size, length - 1)
                   for i, j in ((token, token - 1), (token - 1, token)))
    plain = ~ahead.any() | (ahead == back).all()
    message = ("this model's attention mask is neither causal nor bidirectional inside documents (tokens that see some later tokens, for "
               "example blocks of an image); flamia does not compute it")
    if torch.compiler.is_compiling():
        torch._assert_async(plain, message)
    elif not bool(plain):
        raise NotImplementedError(message)
    start = ~back
    if padding is not None:
        start = start | (padding[:, 1:] != padding[:, :-1])
    return torch.nn.functional.pad(start, (1, 0), value=True)


def _cu_seqlens(start: Tensor) -> Tensor:
    """Of the rows laid one after the other. Traced, its length is fixed: empty documents at the end fill it up."""
    tokens, index = start.numel(), torch.arange(start.numel(), dtype=torch.int32, device=start.device)
    end = torch.full((1,), tokens, dtype=torch.int32, device=start.device)
    if torch.compiler.is_compiling():
        return torch.cat([torch.where(start.flatten(), index, tokens).sort().values.to(torch.int32), end])
    return torch.cat([index[start.flatten()], end])


class _Attention:
    """One registered implementation."""

    def __init__(self, recipe: Recipe, decode: str | None) -> None:
        self.recipe, self.decode = recipe, decode
        self.last: tuple[tuple[Any, ...], Tensor] | None = None  # the layers of a forward pass share mask and positions

    def mask(self, batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
             mask_function: Callable[..., Any] = _causal, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """For transformers' AttentionMaskInterface: bool [batch, tokens], where documents start."""
        if q_length != kv_length:
            if self.decode is None:
                raise NotImplementedError(f"{q_length} queries attend {kv_length} keys, but flamia has no key/value cache. Pass "
                                          "use_cache=False, or register(..., decode=\"sdpa\") for exact attention over the cache")
            from transformers.masking_utils import sdpa_mask
            return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
        if kwargs.get("use_vmap"):
            raise NotImplementedError("this model adds a mask function of its own, which flamia does not compute")
        device = kwargs.get("device") or (attention_mask.device if attention_mask is not None else torch.device("cpu"))
        padding = None if attention_mask is None else attention_mask[:, :kv_length].bool()
        return _starts(batch_size, q_length, mask_function, padding, torch.device(device))

    def documents(self, start: Tensor | None, position_ids: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            return self.find(start, position_ids, shape, device)
        key = (*((weakref.ref(x), x._version) if x is not None else None for x in (start, position_ids)), shape, device)
        if self.last is None or self.last[0] != key:
            self.last = (key, self.find(start, position_ids, shape, device))
        return self.last[1]

    @staticmethod
    def find(start: Tensor | None, position_ids: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
        begin = torch.zeros(shape, dtype=torch.bool, device=device) if start is None else start.clone()
        begin[:, 0] = True
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == shape[1]:
            begin[:, 1:] |= position_ids.diff(dim=1) != 1
        return _cu_seqlens(begin)

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                 dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
                 is_causal: bool | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """For transformers' AttentionInterface: query [batch, heads, tokens, head_dim]; returns [batch, tokens, heads, head_dim]."""
        if dropout:
            raise NotImplementedError(f"dropout is {dropout}, but flamia drops no attention probabilities; set attention_dropout to 0")
        for name, why in _ALLOWED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise NotImplementedError(f"{name} is given, which flamia does not compute: {why}")
        batch, _, tokens, _ = query.shape
        if key.shape[2] != tokens:
            if self.decode is None:
                raise NotImplementedError(f"{tokens} queries attend {key.shape[2]} keys, but flamia has no key/value cache or "
                                          "cross-attention. Pass use_cache=False, or register(..., decode=\"sdpa\")")
            from transformers.integrations.sdpa_attention import sdpa_attention_forward
            return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling, is_causal, **kwargs)
        if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape != (batch, tokens)):
            raise NotImplementedError(f"attention_mask has shape {tuple(attention_mask.shape)}: flamia computes no masks that are given "
                                      "as a matrix. Pass a padding mask [batch, tokens], or position_ids of packed documents")
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if cu_q is not None:
            cu_q = cu_q.to(torch.int32)
            cu_k = cu_q if cu_k is None or cu_k is kwargs["cu_seq_lens_q"] else cu_k.to(torch.int32)
            out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, softmax_scale=scaling, causal=causal, window_size=window,
                                         recipe=self.recipe)
        else:
            cu_seqlens = self.documents(attention_mask, kwargs.get("position_ids"), (batch, tokens), query.device)
            out = attention(q, k, v, cu_seqlens, causal=causal, window=window, scale=scaling, recipe=self.recipe)
        return out.view(batch, tokens, *out.shape[1:]), None


def register(name: str = "flamia", recipe: str | Recipe = "mxfp8", *, decode: str | None = None) -> None:
    """Makes `attn_implementation=name` compute attention with `recipe`, and the masks that belong to it.

    decode: None = attending a key/value cache raises. "sdpa" = steps of generation that attend a cache compute exact attention
    (transformers' own "sdpa"), while the prompt is attended with `recipe`; for inference.

    Raises ValueError for a name that transformers defines itself, for an unknown or contradictory recipe and for another decode.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    if decode not in (None, "sdpa"):
        raise ValueError(f"decode = {decode!r} but must be None or \"sdpa\"")
    taken = AttentionInterface._global_mapping.get(name)
    if name == "eager" or (taken is not None and not isinstance(taken, _Attention)):
        raise ValueError(f"name = {name!r} is an attention of transformers itself; choose another, for example \"flamia\"")
    made = _Attention(recipe if isinstance(recipe, Recipe) else Recipe(recipe), decode)
    AttentionInterface.register(name, made)
    AttentionMaskInterface.register(name, made.mask)
