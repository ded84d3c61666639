# SPDX-License-Identifier: Apache-2.0
"""Attentions by name: who registers them need not know who asks for them (see attention.py)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
Factory = Callable[[str, int], Attention]

_factories: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: makes `factory(argument, row) -> attention` available under `name` or `name:argument`."""
    def add(factory: Factory) -> Factory:
        if name in _factories:
            raise ValueError(f"attention {name!r} is registered already")
        _factories[name] = factory
        return factory
    return add


def make(name: str, row: int) -> Attention:
    """The attention called `name`, for packed rows of `row` tokens."""
    base, _, argument = name.partition(":")
    if base not in _factories:
        raise ValueError(f"attention {name!r} is unknown; registered are: {', '.join(sorted(_factories))}")
    return _factories[base](argument, row)
