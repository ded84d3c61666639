# SPDX-License-Identifier: Apache-2.0
"""Formats, exponents, rotation and quantised operands in torch, with the bits of docs/numerics.md §5 and §8. For emulation.py only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE = 128  # queries and keys of a tile, counted from the document's start
SIGNS = 0x243F6A8885A308D313198A2E03707344  # the fraction of pi: bit c from the top negates channel c
NORM = {64: 0x3E000000, 128: 0x3DB504F3}    # FP32 1 / sqrt(d)
GRID = 65536                                # scores from here on have no 1/32 left in float32
LEAST = -127                                # exponent of a group of zeros


# ---- floats ----

def pow2(e: Tensor) -> Tensor:
    """float32 2^e; e int32, clamped to the normal range."""
    return (e.clamp(-126, 127) + 127).bitwise_left_shift(23).view(torch.float32)


def scaled(x: Tensor, e: Tensor) -> Tensor:
    """x * 2^e as two normal factors, so that no constant is subnormal."""
    low = e.bitwise_right_shift(1)
    return x * pow2(low) * pow2(e - low)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded to float32 once: in float64 the product is exact."""
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def exp2(x: Tensor, kind: str) -> Tensor:
    """2^x as src/numerics/exp2.hpp has it: 0 from -126 down."""
    if kind == "hardware":
        return torch.where(x <= -126, 0, torch.exp2(x))
    if kind not in ("mitchell", "schraudolph"):
        raise NotImplementedError(f"the emulation has no exp2 = {kind}; it has hardware, mitchell and schraudolph")
    line = ((x + (127 - (0.04303566 if kind == "schraudolph" else 0))) * 8388608).clamp(8388608, 255 * 8388608)
    return torch.where(x <= -126, 0, line.int().view(torch.float32))


def rounded(x: Tensor, element: str) -> Tensor:
    """The value of the code nearest x; saturates."""
    if element == "bf16":
        return x.bfloat16().float()
    if element == "e4m3":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    if element == "e2m1":  # 0, .5, 1, 1.5, 2, 3, 4, 6: ties to even multiples of the step are ties to even codes
        size = x.abs().clamp(max=6)
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return torch.copysign(torch.round(size / step) * step, x)
    if element == "int8":
        return x.round().clamp(-127, 127)
    raise NotImplementedError(f"the emulation has no element {element}; it has bf16, e4m3, e2m1 and int8")


def exponent(amax: Tensor, rule: str) -> Tensor:
    """int32: least e with amax <= 448 * 2^e (ceil), or floor(log2 amax) - 8."""
    bits = amax.contiguous().view(torch.int32)
    e = bits.bitwise_right_shift(23) - 135
    if rule == "ceil":
        e = e + ((bits & 0x7FFFFF) > 0x600000).int()
    elif rule != "floor":
        raise NotImplementedError(f"the emulation has no scale rule {rule}; it has ceil and floor")
    return torch.where(bits == 0, LEAST, e.clamp_min(LEAST))


# ---- rotation ----

@functools.cache
def _signs(d: int, device: torch.device) -> Tensor:
    return torch.tensor([-1.0 if SIGNS >> (127 - c) & 1 else 1.0 for c in range(d)], device=device)


@functools.cache
def _norm(d: int, device: torch.device) -> Tensor:
    return torch.tensor(NORM[d], dtype=torch.int32, device=device).view(torch.float32)


def _butterfly(x: Tensor, last: tuple[int, ...] = ()) -> Tensor:
    """Stages h = 1, 2, 4 ..., those of `last` behind the others."""
    d = x.shape[-1]
    stages = [1 << n for n in range(d.bit_length() - 1)]
    for h in (*(h for h in stages if h not in last), *last):
        a, b = x.unflatten(-1, (d // (2 * h), 2, h)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x * _norm(d, x.device)


def rotate(x: Tensor) -> Tensor:
    return _butterfly(x * _signs(x.shape[-1], x.device))


def rotate_back(x: Tensor) -> Tensor:
    return _butterfly(x, (2, 4)) * _signs(x.shape[-1], x.device)


# ---- tiles ----

class Tiles:
    """The documents of a packed row, cut into tiles of 128 tokens from each document's start."""

    def __init__(self, cu_seqlens: Tensor, tokens: int, sizes_of: Callable[[int], list[int]] | None = None) -> None:
        """sizes_of: what the steps' numbers of tiles are filled up to, given the number of tiles; step 0 at least by a tile for every step."""
        edges = cu_seqlens.tolist()
        first, depth, document, left = [], [], [], []
        for number, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            for tile, start in enumerate(range(begin, end, TILE)):
                first.append(start), depth.append(tile), document.append(number), left.append(end - start)
        steps = [[i for i, d in enumerate(depth) if d >= s] for s in range(max(depth, default=-1) + 1)]
        if sizes_of is not None:
            sizes = sizes_of(len(depth))
            empty = sizes[0] - len(depth)
            for values, value in ((first, tokens), (depth, 0), (document, len(edges) - 1), (left, 0)):
                values.extend([value] * empty)
            steps = [list(range(sizes[0])), *steps[1:], *([] for _ in sizes[max(len(steps), 1):])]
            # the last tile and those `step` before it are empty: they attend each other
            steps = [at + [sizes[0] - 1] * (size - len(at)) for at, size in zip(steps, sizes, strict=True)]
        device = cu_seqlens.device
        lane = torch.arange(TILE, device=device)
        self.tokens = tokens
        # [tiles, 128]: is the lane a token, and which one of the packed row; `tokens` beyond the document's end
        self.inside = lane < torch.tensor(left, device=device)[:, None]
        self.index = torch.where(self.inside, torch.tensor(first, device=device)[:, None] + lane, tokens)
        self.depth = torch.tensor(depth, dtype=torch.int32, device=device)
        self.document = torch.tensor(document, dtype=torch.int32, device=device)
        # steps[s]: tiles that have a tile s places before them in their document
        self.steps = [torch.tensor(at, device=device) for at in steps]

    def copy_(self, other: Tiles) -> None:
        """Of equal sizes."""
        for own, given in zip((self.inside, self.index, self.depth, self.document, *self.steps),
                              (other.inside, other.index, other.depth, other.document, *other.steps), strict=True):
            own.copy_(given)

    def gather(self, x: Tensor) -> Tensor:
        """[tokens, heads, d] -> float32 [tiles, heads, 128, d]; 0 beyond the document's end."""
        padded = torch.cat([x.float(), x.new_zeros((1, *x.shape[1:]), dtype=torch.float32)])
        return padded[self.index].transpose(1, 2).contiguous()

    def scatter(self, x: Tensor) -> Tensor:
        """The reverse; 0 for tokens of no document."""
        out = x.new_zeros((self.tokens + 1, x.shape[1], x.shape[3]))
        out[self.index.flatten()] = x.transpose(1, 2).flatten(0, 1)
        return out[:-1]

    def smoothed(self, x: Tensor) -> Tensor:
        """x less the mean of its document's tokens; 0 beyond the document's end."""
        inside = self.inside[:, None, :, None]
        documents = int(self.document.max()) + 1 if len(self.document) else 0
        sums, counts = x.new_zeros((documents, x.shape[1], x.shape[3]), dtype=torch.float64), x.new_zeros(documents, dtype=torch.float64)
        sums.index_add_(0, self.document, torch.where(inside, x, 0).double().sum(2))
        counts.index_add_(0, self.document, self.inside.sum(1).double())
        mean = (sums / counts[:, None, None].clamp_min(1)).float()
        return torch.where(inside, x - mean[self.document][:, :, None], 0)

    def greatest_so_far(self, e: Tensor, headroom: int = 0) -> Tensor:
        """Prefix maximum of [tiles, heads, blocks, groups] over each document's tiles and blocks.

        headroom: added to a document's first exponent, unless that block holds nothing.
        """
        tiles, heads, blocks, groups = e.shape
        if headroom:
            first = e[:, :, :1]
            raised = (self.depth[:, None, None, None] == 0) & (first > LEAST)
            e = torch.cat([torch.where(raised, (first + headroom).clamp_max(126), first), e[:, :, 1:]], 2)
        offset = 1024 * self.document[:, None, None, None]  # documents follow each other: an earlier one never wins
        flat = (e + offset).permute(1, 3, 0, 2).flatten(2)
        return flat.cummax(-1).values.view(heads, groups, tiles, blocks).permute(2, 0, 3, 1) - offset


# ---- row reference ----

def _phase32(m: Tensor | None, x: Tensor) -> Tensor:
    """The reference after a tile whose greatest score is x; m None: the row's first tile."""
    if m is None:
        return torch.where(x.abs() >= GRID, x, torch.ceil(x * 32) / 32) + 0.0
    return torch.where(x.abs() >= GRID, torch.maximum(x, m), torch.where(x > m, m + torch.ceil(x - m), m)) + 0.0


def _careful(m: Tensor, x: Tensor) -> Tensor:
    """tilesum: one step above phase32's."""
    covered = m - 1
    return torch.where(x > covered, _phase32(covered, x) + 1, m)


@dataclass
class Place:
    """Where in its document the key tile of a step lies; it changes what rows do, and compiles to code of its own."""
    first: bool  # the tile of the queries themselves: the diagonal
    early: bool
    late: bool

    @classmethod
    def of(cls, step: int) -> Place:
        return cls(step == 0, step < 3, step >= 16)


class Reference:
    """Every row's reference m and how it moves: numerics.md §8 (phase32), §9 (tilesum)."""

    def __init__(self, like: Tensor, tilesum: bool, kind: str) -> None:
        self.m, self.tilesum, self.kind = torch.zeros_like(like), tilesum, kind
        self.careful, self.rise = torch.ones_like(like, dtype=torch.bool), torch.zeros_like(like)

    def move(self, at: Tensor, place: Place, y: Tensor, rho: Tensor, seen: Tensor) -> Tensor:
        """To the tile's scores; returns the factor of l and O."""
        x, old = torch.where(seen, y * rho, -math.inf).amax(-1), self.m[at]
        if not self.tilesum or place.first:
            new = _phase32(None if place.first else old, x) + (1.0 if self.tilesum else 0.0)
        else:
            careful, new = self.careful[at], old + self.rise[at]
            new = torch.where(careful, _careful(new, x), new)
            codes = rounded(exp2(fma(y, rho, 8 - new[..., None]), self.kind), "e4m3")
            careful = careful | (codes.sum(-1) >= 440)
            self.careful[at] = careful
            new = torch.where(careful, _careful(new, x), new)  # for a row that was careful before it changes nothing
        self.m[at] = new
        return torch.zeros_like(new) if place.first else exp2(old - new, "hardware")

    def free(self, at: Tensor, place: Place, number: Tensor, tile: Tensor, total: Tensor) -> None:
        """After the tile: sums of its codes and of all so far. Flat and settled rows that have more tiles to visit are free from here on.
        number: of those tiles."""
        if not self.tilesum:
            return
        keys = torch.arange(1, TILE + 1, device=tile.device) if place.first else torch.full((TILE,), TILE, device=tile.device)
        looked_at = (number > 0) & ((number % 8 == 0) | place.early) & (keys >= 32)
        flat = total > 640
        freed = self.careful[at] & looked_at & (flat | place.late) & (total > 0) & (self.m[at].abs() < GRID)
        mantissa, e = torch.frexp(tile.clamp_min(1.0))
        log = e - (mantissa == 0.5).int()  # ceil(log2 of it)
        rise = torch.maximum(log - 7 + (keys < TILE).int() + (keys < TILE // 2).int(), torch.where(flat, 6, 7))
        self.rise[at] = torch.where(freed, rise.float(), 0.0)
        self.careful[at] = self.careful[at] & ~freed


# ---- operands ----

@dataclass
class Operand:
    """A quantised form of Q, K, V or dO."""
    values: Tensor    # float32 [tiles, heads, 128, d]: code values, with scales that vary along the channels multiplied in
    exponent: Tensor  # int32 [tiles, heads, 128]: the power of two outside
    greatest: Tensor  # int32 [tiles, heads, 128]: greatest exponent of the token's codes


def _nvfp4(x: Tensor, largest: float, level: Tensor | float) -> tuple[Tensor, Tensor]:
    """(values, scales) of groups along the last axis, with an E4M3 scale of amax / (largest * level)."""
    scale = rounded(x.abs().amax(-1, keepdim=True) / (largest * level), "e4m3") * level
    values = torch.where(scale == 0, 0, rounded(x / torch.where(scale == 0, 1, scale), "e2m1") * scale)
    return values, scale


def _add_square(x: Tensor, total: Tensor) -> Tensor:
    """FP16(x * x + total), rounded once, of FP16 numbers in float32: the sum is rounded to odd first, as src/quantize/rows.cpp does it."""
    square = x * x
    near = total + square
    back = near - total
    rest = (total - (near - back)) + (square - back)
    odd = (near.view(torch.int32) - (rest < 0).int()) | (rest != 0).int()
    return odd.view(torch.float32).half().float()


def _by_inverse(x: Tensor, largest: float, level: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """As _nvfp4, with codes of FP16 quotients; and the groups' squared errors in the order of src/quantize/encode.hpp."""
    scale = rounded(x.abs().amax(-1, keepdim=True) / (largest * level), "e4m3") * level
    quotient = (x * (1 / torch.where(scale == 0, 1, scale))).half().float()
    codes = rounded(quotient, "e2m1")
    apart = (quotient.abs() - codes.abs()).half().float().unflatten(-1, (-1, 8))
    total = torch.zeros_like(scale)
    for octet in apart.unbind(-2):
        sums = torch.zeros_like(octet[..., :2])
        for pair in octet.unflatten(-1, (4, 2)).unbind(-2):
            sums = _add_square(pair, sums)
        total = total + (sums[..., :1] + sums[..., 1:])
    return torch.where(scale == 0, 0, codes * scale), scale, scale * scale * total


def grouped(x: Tensor, form: dict[str, Any], level: Tensor | float) -> tuple[Tensor, Tensor]:
    """NVFP4 of [.., 128, columns] in groups along one axis: values, and every element's scale."""
    if form["group"]["rows"] > 1:
        turned = form | {"group": form["group"] | {"rows": 1, "columns": form["group"]["rows"]}}
        level = level.transpose(-1, -2) if isinstance(level, Tensor) else level
        return tuple(part.transpose(-1, -2) for part in grouped(x.transpose(-1, -2), turned, level))
    groups = x.unflatten(-1, (-1, form["group"]["columns"]))
    level = level[..., None] if isinstance(level, Tensor) else level
    if form["rule"] == "amax_or_smaller":
        values, scale, error = _by_inverse(groups, 6.0, level)
        others, other, less = _by_inverse(groups, 4.0, level)
        better = (scale == 0) | (less < error)
        values, scale = torch.where(better, others, values), torch.where(better, other, scale)
    else:
        values, scale = _nvfp4(groups, 6.0, level)
    return values.flatten(-2), scale.expand_as(groups).flatten(-2)


def _level(amax: Tensor) -> Tensor:
    """The first of two levels. It ends at 2^-100: compiled code divides by way of the inverse, which is infinite below 2^-128."""
    return torch.where(amax == 0, 1, (amax / (448 * 6)).clamp_min(2.0 ** -100))


def quantise_nvfp4(x: Tensor, form: dict[str, Any]) -> Operand:
    """Of two levels the second is one for a tile and head."""
    values, scale = grouped(x, form, _level(x.abs().amax((-2, -1), keepdim=True)) if form["rule"] == "two_level" else form["tensor_scale"])
    greatest = torch.where(scale > 0, torch.ceil(torch.log2(scale)), LEAST).amax(-1).int()
    return Operand(values, torch.zeros_like(greatest), greatest)


def whole(x: Tensor, form: dict[str, Any]) -> Tensor:
    """INT8 of [.., 128, columns] in blocks with a float32 scale, multiplied in."""
    rows, columns = form["group"]["rows"], form["group"]["columns"] or x.shape[-1]
    blocks = x.unflatten(-1, (-1, min(columns, x.shape[-1]))).unflatten(-3, (-1, rows))
    scale = blocks.abs().amax((-3, -1), keepdim=True) / 127
    return torch.where(scale == 0, 0, rounded(blocks / torch.where(scale == 0, 1, scale), "int8") * scale).flatten(-2).flatten(-3, -2)


def in_blocks(z: Tensor, form: dict[str, Any], over_keys: bool) -> Tensor:
    """P or dS [.., 128 queries, 128 keys] in NVFP4 or INT8, scales multiplied in. over_keys: the product contracts over keys."""
    if form["element"] == "int8":
        return whole(z, form)
    if form["rule"] == "two_level":
        return grouped(z, form, _level(z.abs().amax(-1 if over_keys else -2, keepdim=True)))[0]
    return grouped(z, form, form["tensor_scale"])[0]


def quantise(x: Tensor, form: dict[str, Any], tiles: Tiles) -> Operand:
    """x from Tiles.gather; form: a quantisation of a recipe's JSON. Finite input only."""
    count, heads, _, d = x.shape
    zero = torch.zeros((count, heads, TILE), dtype=torch.int32, device=x.device)
    if form["element"] == "bf16":
        return Operand(rounded(x, "bf16"), zero, zero)
    group, rule = form["group"], form["rule"]
    if form["element"] == "e2m1" and form["scale"] == "e4m3" and group["kind"] == "blocks" and 1 in (group["rows"], group["columns"]):
        return quantise_nvfp4(x, form)
    if form["element"] == "int8" and form["scale"] == "f32" and group["kind"] == "blocks":
        return Operand(whole(x, form), zero, zero)
    if form["scale"] != "ue8m0":
        raise NotImplementedError(f"the emulation has no {form['scale']} scales of Q, K, V and dO; it has powers of two (ue8m0)")
    if group["kind"] in ("tensor", "head"):
        axes = (0, 1, 2, 3) if group["kind"] == "tensor" else (0, 2, 3)
        e = exponent(x.abs().amax(axes, keepdim=True), rule).expand(count, heads, TILE, 1)
    elif group["kind"] == "blocks" and group["rows"] > 0:
        rows, columns = group["rows"], min(group["columns"] or d, d)
        blocks = x.view(count, heads, TILE // rows, rows, d // columns, columns)
        e = exponent(blocks.abs().amax((3, 5)), rule)
        if form["sticky"]:
            e = tiles.greatest_so_far(e, form.get("headroom", 0))
        e = e.repeat_interleave(rows, 2)
    else:
        raise NotImplementedError(f"the emulation has no scale group {group} of Q, K, V and dO")
    wide = e.repeat_interleave(d // e.shape[3], 3)
    codes = rounded(x * pow2(-wide), form["element"])
    if e.shape[3] > 1:
        return Operand(codes * pow2(wide), zero, e.amax(3))
    return Operand(codes, e[..., 0], e[..., 0])
