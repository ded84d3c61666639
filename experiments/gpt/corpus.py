# SPDX-License-Identifier: Apache-2.0
"""The corpus file: documents in a fixed order, the held-out ones last, compressed with xz.

Layout after decompression (little endian):

    16 bytes        magic  b"flamia-corpus-1\\n"
    uint32          number of documents, n
    uint32          number of training documents; the other ones are held out
    uint32 [n]      length of each document in bytes
    uint8  [...]    the documents, one after the other; no document holds byte 0
"""

from __future__ import annotations

import array
import lzma
import struct
import sys
from pathlib import Path

MAGIC = b"flamia-corpus-1\n"
HEADER = struct.Struct("<II")


def _lengths(values: list[int] | bytes) -> array.array:
    table = array.array("I", values)
    if table.itemsize != 4:
        raise RuntimeError("array type 'I' is not 32 bits wide on this platform; the corpus format needs uint32")
    if sys.byteorder == "big":
        table.byteswap()
    return table


def write_corpus(path: Path, train: list[bytes], held_out: list[bytes], preset: int = 6) -> None:
    """Writes the documents in the order given."""
    documents = train + held_out
    for index, document in enumerate(documents):
        if not document or 0 in document:
            raise ValueError(f"document {index} is empty or holds byte 0, which marks document starts")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=preset) as out:
        out.write(MAGIC + HEADER.pack(len(documents), len(train)))
        out.write(_lengths([len(document) for document in documents]).tobytes())
        out.write(b"".join(documents))


def is_corpus(path: Path) -> bool:
    """True when `path` is an xz file that starts with the corpus magic."""
    try:
        with lzma.open(path, "rb") as source:
            return source.read(len(MAGIC)) == MAGIC
    except lzma.LZMAError:
        return False


def read_corpus(path: Path) -> tuple[list[bytes], list[bytes]]:
    """Returns (training documents, held-out documents)."""
    blob = lzma.open(path, "rb").read()
    if blob[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path}: not a corpus file (magic {blob[:16]!r}, expected {MAGIC!r}); make one with collect.py")
    count, train = HEADER.unpack_from(blob, len(MAGIC))
    table = len(MAGIC) + HEADER.size
    lengths = _lengths(blob[table : table + 4 * count])
    start = table + 4 * count
    if start + sum(lengths) != len(blob):
        raise ValueError(f"{path}: the lengths add up to {sum(lengths)} bytes but the file holds {len(blob) - start}")
    documents = []
    for length in lengths:
        documents.append(blob[start : start + length])
        start += length
    return documents[:train], documents[train:]
