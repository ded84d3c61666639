# SPDX-License-Identifier: Apache-2.0
"""Plans of the C API, made once per shape and kept."""

from __future__ import annotations

import functools
import weakref
from ctypes import byref, c_void_p, sizeof
from typing import NamedTuple

from . import _library
from ._library import lib
from .recipe import Recipe


class Call(NamedTuple):
    """What a plan depends on."""
    tokens: int
    documents: int  # cu_seqlens has documents + 1 entries
    query_heads: int
    key_heads: int
    head_dim: int
    causal: bool
    window_left: int
    window_right: int
    scale: float  # 0 = 1 / sqrt(head_dim)
    recipe: str
    device: str  # "cpu" or "cuda"
    device_index: int  # the CUDA device that is current while the plan is made; 0 on the CPU
    threads: int  # CPU; 0 = all cores
    deterministic: bool
    training: bool


@functools.lru_cache(maxsize=64)
def recipe(text: str) -> Recipe:
    return Recipe(text)


class Plan:
    """Raises what flamia_plan_create reports: ValueError for a wrong argument, NotImplementedError for what this recipe, device or
    build does not do."""

    def __init__(self, call: Call) -> None:
        problem = _library.Problem(sizeof(_library.Problem), call.tokens, call.documents, call.query_heads, call.key_heads,
                                   call.head_dim, call.causal, call.window_left, call.window_right, call.scale, 0)
        device = _library.CUDA if call.device == "cuda" else _library.CPU
        options = _library.PlanOptions(sizeof(_library.PlanOptions), device, call.threads, call.deterministic, call.training)
        self.handle = c_void_p()
        _library.check(lib.flamia_plan_create(byref(problem), recipe(call.recipe)._handle, byref(options), byref(self.handle)))
        weakref.finalize(self, lib.flamia_plan_destroy, self.handle)
        self.saved_bytes = int(lib.flamia_plan_saved_bytes(self.handle))
        self.forward_bytes = int(lib.flamia_plan_workspace_bytes(self.handle, _library.FORWARD))
        self.backward_bytes = int(lib.flamia_plan_workspace_bytes(self.handle, _library.BACKWARD))


@functools.lru_cache(maxsize=1024)
def plan(call: Call) -> Plan:
    """The plan for `call`; the least recently used of more than 1024 is forgotten."""
    return Plan(call)
