# SPDX-License-Identifier: Apache-2.0
"""Packed documents: text into rows of `row` tokens without padding, and the document boundaries inside each row.

The documents of a split are laid one after the other, byte 0 before each, and the stream is cut into rows. A document that
crosses the end of a row is cut there: its rest is a document of its own in the next row, and positions restart. The target
of a token is the byte after it in the stream, so the last byte of a document predicts byte 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corpus import is_corpus, read_corpus

HELD_OUT_SHARE = 0.05  # of a plain text file


def read_documents(path: Path) -> tuple[list[bytes], list[bytes]]:
    """(training, held-out) documents of a corpus file, or of a plain text file such as enwik8, cut before each `<page>`."""
    if not path.is_file():
        raise FileNotFoundError(f"--data {path}: no such file; make a corpus with collect.py, or give a text file such as enwik8")
    if is_corpus(path):
        return read_corpus(path)
    text = path.read_bytes().replace(b"\x00", b"")
    cuts = [match.start() for match in re.finditer(rb"^ *<page>", text, re.MULTILINE)]
    edges = [0, *(cut for cut in cuts if cut > 0), len(text)]
    documents = [text[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]
    if len(documents) == 1:  # no pages: hold out the end of the one document
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        return [text[:cut]], [text[cut:]]
    kept, count = 0, 0
    while kept < (1 - HELD_OUT_SHARE) * len(text) and count < len(documents) - 1:
        kept, count = kept + len(documents[count]), count + 1
    return documents[:count], documents[count:]


@dataclass(frozen=True)
class Plan:
    """Which rows the next batches read, and their document boundaries.

    offsets       int64 [steps, rows]: first byte of each row in the stream
    cu_seqlens    int32 [steps, capacity + 1], padded with the number of tokens (empty documents)
    """

    offsets: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> Plan:
        return Plan(self.offsets.to(device), self.cu_seqlens.to(device))


@dataclass(frozen=True)
class Batch:
    tokens: Tensor      # int64 [rows * row]
    targets: Tensor     # int64 [rows * row]
    positions: Tensor   # int64 [rows * row], from the start of the document
    cu_seqlens: Tensor  # int32 [capacity + 1]


class Packed:
    """One split as a stream of bytes, read in batches of `rows` rows of `row` tokens.

    With a seed, every epoch reads the rows in another order and starts the first row at another byte; without one, in order.
    What step s reads depends on (seed, s) only, so a run resumes at any step.
    """

    def __init__(self, documents: list[bytes], row: int, rows: int, seed: int | None = None) -> None:
        stream = b"".join(b"\x00" + document for document in documents) + b"\x00"
        self.stream = np.frombuffer(stream, dtype=np.uint8)
        self.starts = np.flatnonzero(self.stream == 0)
        self.row, self.rows, self.seed = row, rows, seed
        self.batches = (len(stream) - 1 - (row if seed is not None else 0)) // row // rows  # of one epoch
        if self.batches < 1:
            raise ValueError(f"--data: a split holds {len(stream)} bytes, but one batch of {rows} rows of {row} tokens needs "
                             f"{(rows + 1) * row + 1}; give more text, or fewer --rows")
        in_a_row = np.searchsorted(self.starts, self.starts + row) - np.arange(len(self.starts))
        self.capacity = rows * (int(in_a_row.max()) + 1)  # documents of a batch, at most
        self._epoch, self._order, self._shift = -1, np.arange(self.batches * rows), 0

    def row_offsets(self, step: int) -> np.ndarray:
        """int64 [rows]: where the rows of batch `step` start in the stream."""
        epoch, batch = divmod(step, self.batches)
        if self.seed is not None and epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._epoch, self._order = epoch, random.permutation(self.batches * self.rows)
            self._shift = int(random.integers(self.row))
        return self._order[batch * self.rows : (batch + 1) * self.rows] * self.row + self._shift

    def boundaries(self, offsets: np.ndarray) -> np.ndarray:
        """int32 [n + 1]: cu_seqlens of the rows at `offsets`, laid one after the other."""
        cu = []
        for index, offset in enumerate(offsets):
            first, last = np.searchsorted(self.starts, [offset + 1, offset + self.row])
            cu += [[index * self.row], self.starts[first:last] - offset + index * self.row]
        return np.concatenate([*cu, [len(offsets) * self.row]]).astype(np.int32)

    def plan(self, step: int, steps: int) -> Plan:
        """The plan of batches `step` to `step + steps - 1`, on the CPU."""
        offsets = np.stack([self.row_offsets(step + s) for s in range(steps)])
        cu_seqlens = np.full((steps, self.capacity + 1), self.rows * self.row, dtype=np.int32)
        for cu, batch in zip(cu_seqlens, offsets, strict=True):
            found = self.boundaries(batch)
            cu[: len(found)] = found
        return Plan(torch.from_numpy(offsets), torch.from_numpy(cu_seqlens))


def gather(stream: Tensor, offsets: Tensor, cu_seqlens: Tensor, row: int) -> Batch:
    """Reads one batch from `stream` (uint8, on the training device) without waiting for the device."""
    index = (offsets[:, None] + torch.arange(row, device=stream.device)).flatten()
    token = torch.arange(index.numel(), device=stream.device)
    document = torch.searchsorted(cu_seqlens, token.int(), right=True) - 1
    return Batch(stream[index].long(), stream[index + 1].long(), token - cu_seqlens[document].long(), cu_seqlens)
