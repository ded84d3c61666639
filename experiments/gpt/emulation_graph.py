# SPDX-License-Identifier: Apache-2.0
"""Forward and backward pass of the emulation in CUDA graphs: its thousands of small kernels cost Python more than the GPU.

A graph has fixed sizes, so tiles and steps are filled up with tiles without a token (`Tiles`), whose results nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulation_numbers import TILE, Tiles

FILLED = 64  # the number of tiles is a multiple of it, so that few sizes occur

Forward = Callable[[Tensor, Tensor, Tensor, Tiles], tuple[Any, Tensor]]
Backward = Callable[[Tensor, Any, Tiles], tuple[Tensor, Tensor, Tensor]]


def capacity(count: int, tokens: int, row: int) -> list[int]:
    """Sizes of the steps of `count` tiles in rows of `row` tokens: of a document of n tiles n - s have s tiles before them, and it is longer than
    n - 1 tiles."""
    steps = -(-row // TILE)
    return [-(-(count + steps) // FILLED) * FILLED, *(-(-tokens // row) * (steps - s) for s in range(1, steps))]


class Layer:
    """The calls of one layer and one size. With graphs the first forward and backward pass run without, to compile what is compiled."""

    def __init__(self, forward: Forward, backward: Backward, graphs: bool) -> None:
        self._forward, self._backward, self._with_graphs = forward, backward, graphs
        self._calls, self._warm = 0, False
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._inputs: dict[str, tuple[Tensor, ...]] = {}
        self._results: dict[str, Any] = {}

    def forward(self, operands: tuple[Tensor, ...], tiles: Tiles) -> tuple[tuple[Any, int], Tensor]:
        """What backward() needs, and the output."""
        self._calls += 1
        if not self._with_graphs or self._calls == 1:
            saved, out = self._forward(*operands, tiles)
            return (saved, 0), out
        saved, out = self._replay("forward", self._forward, operands, tiles)
        return (saved, self._calls), out.clone()

    def backward(self, d_out: Tensor, kept: tuple[Any, int], tiles: Tiles) -> tuple[Tensor, ...]:
        saved, call = kept
        if call not in (0, self._calls):
            raise RuntimeError("the emulation's graphs keep one forward pass of a layer, and a later one came before this one's backward pass")
        if call == 0 or not self._warm:
            self._warm = True
            return self._backward(d_out, saved, tiles)
        gradients = self._replay("backward", lambda d_out, tiles: self._backward(d_out, saved, tiles), (d_out,), tiles)
        return tuple(x.clone() for x in gradients)

    def _replay(self, name: str, work: Callable[..., Any], operands: tuple[Tensor, ...], tiles: Tiles) -> Any:
        if name not in self._graphs:
            self._inputs[name] = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results[name] = work(*self._inputs[name], tiles)
            self._graphs[name] = graph
        for own, given in zip(self._inputs[name], operands, strict=True):
            own.copy_(given)
        self._graphs[name].replay()
        return self._results[name]


class Layers:
    """The layers of a model, told apart by the order of their calls: those of a step share their cu_seqlens. row: of how many tokens a packed
    row is at most, for graphs; None: without."""

    def __init__(self, forward: Forward, backward: Backward, row: int | None) -> None:
        self._passes, self._row = (forward, backward), row
        self._plain = Layer(forward, backward, False)
        self._layers: dict[tuple[Any, ...], Layer] = {}
        self._tiles: dict[tuple[int, ...], Tiles] = {}
        self._last: list[Any] = [None, -1]  # cu_seqlens and its version
        self._now: Tiles | None = None
        self._number = 0

    def next(self, q: Tensor, cu_seqlens: Tensor) -> tuple[Layer, Tiles]:
        """The layer whose turn it is, and the tiles of the step."""
        if self._last[0] is not cu_seqlens or self._last[1] != cu_seqlens._version:
            self._last[:] = [cu_seqlens, cu_seqlens._version]
            self._now, self._number = self._take(q.shape[0], cu_seqlens), 0
        assert self._now is not None
        if self._row is None:
            return self._plain, self._now
        key = (id(self._now), self._number, q.shape, q.dtype)
        self._number += 1
        return self._layers.setdefault(key, Layer(*self._passes, True)), self._now

    def _take(self, tokens: int, cu_seqlens: Tensor) -> Tiles:
        """The tiles of these documents; with graphs in the tensors where the graphs look for them."""
        if (row := self._row) is None:
            return Tiles(cu_seqlens, tokens)
        tiles = Tiles(cu_seqlens, tokens, lambda count: capacity(count, tokens, row))
        kept = self._tiles.setdefault((tokens, *map(len, tiles.steps)), tiles)
        if kept is not tiles:
            kept.copy_(tiles)
        return kept
