# SPDX-License-Identifier: Apache-2.0
"""`--attention emulated:<recipe>`: causal attention with a recipe's numbers in plain torch, for training recipes that have no GPU kernel.

Slow, and used for nothing else. The operands' codes are those of the library's CPU backend in every bit, and the arithmetic between
them is that of docs/numerics.md §8 in the order that the CPU backend uses, short of the order of sums inside a product and of the last
bit of exp2 (test_emulation.py). Finite input only: NaN spreads further than §10 says.

Options after the recipe, each a mistake that training should show:
    emulated:mxfp8+backward_exp2=schraudolph     the backward pass recomputes P with another exp2 than the forward pass used
    emulated:mxfp8+backward_reference=integer    ... from the nearest whole row reference above m
    emulated:mxfp8+gradient_p=codes              dS takes P as it was rounded for the product with V
    emulated:mxfp8+ds=constant8                  dS is multiplied by 2^8 whatever its size, and rounded to E4M3; or constant12, constant16
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from registry import Attention, register
from emulation_graph import Layer, Layers
from emulation_numbers import LEAST, TILE, Operand, Place, Reference, Tiles, exp2, exponent, fma, in_blocks, pow2, quantise, rotate, rotate_back, rounded, scaled

MISTAKES = {"backward_exp2": ("mitchell", "schraudolph"), "backward_reference": ("integer",), "gradient_p": ("codes",), "ds": ("constant8", "constant12", "constant16")}


@dataclass
class Settings:
    """A recipe's JSON and what follows from it."""
    recipe: dict[str, Any]
    scale: float
    rotate: bool
    code_exponent: int
    mistakes: dict[str, str]

    @property
    def scale_log2(self) -> float:
        return self.scale * 1.4426950408889634

    @property
    def kind(self) -> str:
        return str(self.recipe["softmax"]["exp2"])


def settings_of(text: str, scale: float, head_dim: int, mistakes: dict[str, str]) -> Settings:
    import flamia
    recipe = json.loads(flamia.Recipe(text).to_json())
    softmax, accumulation, safety = recipe["softmax"], recipe["accumulation"], recipe["safety"]
    for wrong, what in ((not recipe["trains"], "no backward pass"), (softmax["sum"] != "codes", "l summed before rounding"),
                        (recipe["smoothing"]["q"], "smoothing of Q"), (any(safety.values()), "safety folds"),
                        (accumulation["model"] != "native", "the hopper13 accumulator"),
                        (accumulation["dq_prescale"] != "causal_row", "one dQ pre-scale per sequence"),
                        ({recipe["p"][use]["element"] for use in ("first", "second")} - {"bf16", "e4m3", "e2m1", "int8"}, "other codes of P")):
        if wrong:
            raise NotImplementedError(f"recipe {text!r} has {what}, which the emulation does not compute")
    if mistakes.get("ds"):
        group = {"kind": "constant", "rows": 0, "columns": 0, "exponent": int(mistakes["ds"].removeprefix("constant"))}
        recipe["d_s"] = {use: recipe["d_s"][use] | {"element": "e4m3", "group": group} for use in ("first", "second")}
    recipe["gradient_p"] = mistakes.get("gradient_p", recipe["gradient_p"])
    constant = recipe["p"]["first"]["group"]["kind"] in ("constant", "tensor")
    code_exponent = 8 if constant else 0
    return Settings(recipe, scale, recipe["rotate"] and head_dim in (64, 128), code_exponent, mistakes)


@dataclass
class Rounding:
    """What rounding does to dS on its way into the products dQ and dK, summed over the tiles of backward passes."""
    pairs: Tensor  # elements of dS that are not 0
    mass: Tensor  # sum of |dS|
    square: Tensor  # sum of dS^2
    zeros: dict[str, Tensor]  # elements that became 0
    lost: dict[str, Tensor]  # sum of their |dS|
    error: dict[str, Tensor]  # sum of (rounded dS - dS)^2

    @classmethod
    def none(cls, device: torch.device) -> Rounding:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, zero, zero, *({"dq": zero, "dk": zero} for _ in range(3)))

    def add(self, ds: Tensor, payload: dict[str, Tensor]) -> None:
        """ds: as it is; payload: as the two products get it, both with all exponents."""
        ds = ds.double()
        self.pairs, self.mass, self.square = self.pairs + (ds != 0).sum(), self.mass + ds.abs().sum(), self.square + ds.square().sum()
        for name, x in payload.items():
            self.zeros[name] = self.zeros[name] + ((x == 0) & (ds != 0)).sum()
            self.lost[name] = self.lost[name] + torch.where(x == 0, ds, 0).abs().sum()
            self.error[name] = self.error[name] + (x.double() - ds).square().sum()

    def shares(self) -> dict[str, float]:
        found = {f"ds_zeros_{name}": x / self.pairs for name, x in self.zeros.items()}
        found |= {f"ds_lost_{name}": x / self.mass for name, x in self.lost.items()}
        found |= {f"ds_error_{name}": (x / self.square).sqrt() for name, x in self.error.items()}
        return {name: float(x.nan_to_num(0)) for name, x in found.items()}


@dataclass
class Saved:
    q: Operand
    k: Operand
    v: Operand
    q2: Operand
    k2: Operand
    v2: Operand
    m: Tensor  # float32 [tiles, heads, 128]
    l: Tensor  # noqa: E741 -- the name of the formulas
    out: Tensor  # float32 [tiles, heads, 128, d], rounded to BF16


@functools.cache
def _fused(function: Callable[..., None], backend: str) -> Callable[..., None]:
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # recipes, places, groups of one tile
    compiled = torch.compile(function, fullgraph=True, backend=backend)

    def run(*arguments: Any) -> None:
        _tiles_vary(arguments)
        compiled(*arguments)
    return run


def _tiles_vary(x: Any) -> None:
    """The number of tiles is another in every step, all other sizes are constants of the code."""
    if isinstance(x, Tensor) and x.dim():
        torch._dynamo.maybe_mark_dynamic(x, 0)
    elif isinstance(x, tuple):
        for part in x:
            _tiles_vary(part)
    elif isinstance(x, (Operand, Reference, Saved, Gradients)):
        _tiles_vary(tuple(vars(x).values()))


def _backend(device: torch.device) -> str:
    """EMULATION_BACKEND, or what it is by default: on a GPU the elementwise work between two products is one kernel, some ten times faster than
    without, and all kernels of a pass are one graph. "inductor": without graphs; any other backend of torch.compile, on a CPU too; "none"."""
    return os.environ.get("EMULATION_BACKEND", "graphs" if device.type == "cuda" else "none")


def _compiled(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    backend = _backend(device)
    return function if backend == "none" else _fused(function, "inductor" if backend == "graphs" else backend)


def _diagonal(device: torch.device) -> Tensor:
    return torch.ones(TILE, TILE, dtype=torch.bool, device=device).tril()


def _scores(q: Operand, k: Operand, at: Tensor, back: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """y [tiles, heads, queries, keys] and rho [tiles, heads, queries, 1]; t = y * rho."""
    y = scaled(q.values[at] @ k.values[back].transpose(-1, -2), k.exponent[back][:, :, None, :])
    base = torch.full((), s.scale_log2, dtype=torch.float32, device=y.device)
    return y, scaled(base, q.exponent[at])[..., None]


def _apart(form: dict[str, Any]) -> bool:
    """Whether its scales are no powers of two, so that they are multiplied in."""
    return form["element"] in ("e2m1", "int8")


def _block_exponents(form: dict[str, Any], z: Tensor) -> Tensor:
    """Exponents of the blocks of [.., 128 queries, 128 keys], one for every element."""
    rows, columns = form["group"]["rows"] or TILE, form["group"]["columns"] or TILE
    blocks = z.abs().unflatten(-1, (TILE // columns, columns)).unflatten(-3, (TILE // rows, rows)).amax((-3, -1))
    return exponent(blocks, form["rule"]).repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def _forward_tile(operands: tuple[Operand, Operand, Operand], rows: Reference, l: Tensor, total: Tensor, at: Tensor, back: Tensor,  # noqa: E741
                  number: Tensor, place: Place, s: Settings) -> None:
    """The tiles `at` of queries attend the tiles `back` of keys: moves rows, l and total."""
    q, k, v = operands
    b, p_form = s.code_exponent, s.recipe["p"]["first"]
    y, rho = _scores(q, k, at, back, s)
    seen = _diagonal(y.device) if place.first else torch.ones((), dtype=torch.bool, device=y.device)
    correction = rows.move(at, place, y, rho, seen)
    new = rows.m[at]
    key_exponent = v.exponent[back]
    if p_form["group"]["kind"] == "blocks":
        p = torch.where(seen, exp2(fma(y, rho, -new[..., None]), s.kind), 0)
        e = torch.zeros_like(p).int() if _apart(p_form) else _block_exponents(p_form, p)
        codes = in_blocks(p, p_form, True) if _apart(p_form) else scaled(rounded(p * pow2(-e), p_form["element"]), e)
        row_sum, values, reference = codes.sum(-1), v.values[back] * pow2(key_exponent)[..., None], torch.zeros_like(new).int()
    else:
        unfolded = rounded(exp2(fma(y, rho, b - new[..., None]), s.kind), p_form["element"])
        row_sum = torch.where(seen, unfolded, 0).sum(-1) * 2.0 ** -b
        greatest = key_exponent.cummax(-1).values if place.first else key_exponent.amax(-1, keepdim=True).expand_as(key_exponent)
        fold = (key_exponent[:, :, None, :] - greatest[..., None] + b).float()
        codes = torch.where(seen, rounded(exp2(fma(y, rho, fold - new[..., None]), s.kind), p_form["element"]), 0)
        values, reference = v.values[back], greatest
    l[at] = l[at] * correction + row_sum
    if p_form["group"]["kind"] != "blocks":
        rows.free(at, place, number, row_sum * 2.0 ** b, l[at] * 2.0 ** b)
    total[at] = fma(total[at], correction[..., None], scaled(codes @ values, reference[..., None]))


def forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, s: Settings, once: bool = False) -> tuple[Saved, Tensor]:
    """q, k, v from Tiles.gather. once: compiling would not pay."""
    recipe = s.recipe
    turn = rotate if s.rotate else (lambda x: x)
    forms = {name: {use: quantise(x, recipe[name][use], tiles) for use in ("first", "second")}
             for name, x in (("q", turn(q)), ("k", tiles.smoothed(turn(k)) if recipe["smoothing"]["k"] else turn(k)), ("v", v))}
    if recipe["d_out_times_v_bf16"]:  # of V itself or of what its INT8 codes stand for
        of_d_p = forms["v"]["second"]
        forms["v"]["second"] = Operand(rounded(of_d_p.values, "bf16"), of_d_p.exponent, of_d_p.greatest)
    first = tuple(forms[name]["first"] for name in "qkv")
    rows = Reference(q[..., 0], recipe["softmax"]["reference"] == "tilesum", s.kind)
    l, total = torch.zeros_like(q[..., 0]), torch.zeros_like(q)  # noqa: E741
    run = _forward_tile if once else _compiled(_forward_tile, q.device)
    for step, at in enumerate(tiles.steps):
        run(first, rows, l, total, at, at - step, (tiles.depth[at] - step)[:, None, None], Place.of(step), s)
    out = total * 2.0 ** -s.code_exponent / l[..., None]
    return Saved(*first, *(forms[name]["second"] for name in "qkv"), rows.m, l, rounded(out, "bf16")), out


def _pre_scale(g: Operand, saved: Saved, tiles: Tiles) -> Tensor:
    """int32 [tiles, heads, 128]: z of numerics.md §6, from exponents alone."""
    so_far = [tiles.greatest_so_far(x.greatest[..., None])[..., 0] for x in (saved.v2, saved.k2)]
    d = g.values.shape[-1]
    bound = 2.002 * g.values.double().square().sum(-1).sqrt() * saved.l.double() * (448.0 * 448.0 * math.sqrt(d))
    e = torch.frexp(bound).exponent + so_far[0] + so_far[1] + g.exponent
    return torch.where((bound > 0) & (bound < 1e300), (15 - e).clamp(-250, 250), 127).int()


def _payload(form: dict[str, Any], one: bool, ds: Tensor, g: Operand, partner: Tensor, over_keys: bool,
             diagonal: bool) -> tuple[Tensor, Tensor]:
    """dS rounded for one product: values, and the exponents that stay outside, one for every element.

    partner: exponent of the other factor (K for dQ, Q for dK), broadcast over [queries, keys].
    """
    kind, rows, columns = form["group"]["kind"], form["group"]["rows"] or TILE, form["group"]["columns"] or TILE
    rows_exponent = g[..., None]
    nothing = torch.zeros((), dtype=torch.int32, device=ds.device)
    if kind == "none":
        return rounded(scaled(ds, rows_exponent + partner), "bf16"), nothing
    if kind == "constant":
        shift = form["group"]["exponent"]
        return scaled(rounded(scaled(ds, rows_exponent + shift), form["element"]), partner - shift), nothing
    if kind != "blocks" or (one and (rows, columns) == (TILE, TILE)):
        raise NotImplementedError(f"the emulation has no scale group {form['group']} of dS")
    z = scaled(ds, rows_exponent if one else rows_exponent + partner)
    if _apart(form):
        values = in_blocks(z, form, over_keys)
        return scaled(values, partner) if one else values, nothing
    if not one and not over_keys and rows > 1 and columns > 1:  # numerics.md §8: only the block's queries from the key on
        greatest = z.abs().unflatten(-1, (TILE // columns, columns)).amax(-1)  # [.., queries, key blocks]
        suffix = greatest.unflatten(-2, (TILE // rows, rows)).flip(-2).cummax(-2).values.flip(-2)
        if diagonal:
            key = torch.arange(TILE, device=ds.device)
            start = key[None, :] - rows * torch.arange(TILE // rows, device=ds.device)[:, None]  # of the key inside each block
            per_key = suffix.repeat_interleave(columns, -1)  # [.., blocks, rows, keys]
            index = start.clamp(0, rows - 1)[:, None, :].expand(*per_key.shape[:-2], 1, TILE)
            per_key = torch.where(start < rows, per_key.gather(-2, index)[..., 0, :], 0)
        else:
            per_key = suffix[..., 0, :].repeat_interleave(columns, -1)
        e = exponent(per_key, form["rule"]).repeat_interleave(rows, -2)
    else:
        e = _block_exponents(form, z)
    values = rounded(z * pow2(-e), form["element"])
    if one:
        return scaled(values, e + partner), nothing
    if (columns if over_keys else rows) >= (TILE if over_keys else 64):
        return values, e
    return scaled(values, e), nothing


@dataclass
class Gradients:
    """What a backward pass knows of its queries, and the sums that it adds to."""
    g: Operand
    g2: Operand
    d: Tensor
    m: Tensor
    pre_scale: Tensor | None
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor


def _p_of_ds(y: Tensor, rho: Tensor, m: Tensor, kind: str, s: Settings) -> Tensor:
    """The P that dS takes, masked pairs too."""
    b = s.code_exponent
    if s.recipe["gradient_p"] == "codes":
        return rounded(exp2(fma(y, rho, b - m), kind), s.recipe["p"]["first"]["element"]) * 2.0 ** -b
    return exp2(fma(y, rho, -m), kind)


def _d_p(saved: Saved, sums: Gradients, at: Tensor, back: Tensor, less: Tensor) -> Tensor:
    """dP' - less."""
    e = saved.v2.exponent[back][:, :, None, :]
    low = e.bitwise_right_shift(1)
    return fma(sums.g.values[at] @ saved.v2.values[back].transpose(-1, -2) * pow2(low), pow2(e - low), -less)


def _row_sum_tile(saved: Saved, sums: Gradients, mass: Tensor, at: Tensor, back: Tensor, inside: Tensor, place: Place, s: Settings) -> None:
    """Adds the tile's sums of P * dP' to sums.d and of P to mass, with the numbers that dS takes."""
    y, rho = _scores(saved.q, saved.k, at, back, s)
    p = _p_of_ds(y, rho, sums.m[at], s.mistakes.get("backward_exp2", s.kind), s)
    p = torch.where(inside[:, None, :, None] & (_diagonal(p.device) if place.first else True), p, 0)
    sums.d[at] += (p * _d_p(saved, sums, at, back, torch.zeros_like(p))).sum(-1, keepdim=True)
    mass[at] += p.sum(-1, keepdim=True)


def _backward_tile(saved: Saved, sums: Gradients, at: Tensor, back: Tensor, inside: Tensor, place: Place, s: Settings,
                   seen_by: Rounding | None = None) -> None:
    """Adds what the tiles `at` of queries and `back` of keys have of the gradients."""
    recipe, b, one = s.recipe, s.code_exponent, s.recipe["one_ds_payload"]
    p_form, ds_first = recipe["p"]["second"], recipe["d_s"]["first"]
    ds_second = ds_first if one else recipe["d_s"]["second"]
    kind = s.mistakes.get("backward_exp2", s.kind)
    m, own = sums.m[at], sums.g2.exponent[at]
    y, rho = _scores(saved.q, saved.k, at, back, s)
    seen = inside[:, None, :, None] & (_diagonal(y.device) if place.first else True)
    ds = torch.where(seen, _p_of_ds(y, rho, m, kind, s) * _d_p(saved, sums, at, back, sums.d[at]), 0)

    # dV
    if p_form["group"]["kind"] == "blocks":
        p = torch.where(seen, exp2(fma(y, rho, -m), kind), 0)
        e = torch.zeros_like(p).int() if _apart(p_form) else _block_exponents(p_form, p)
        codes = in_blocks(p, p_form, False) if _apart(p_form) else rounded(p * pow2(-e), p_form["element"])
        codes = scaled(codes, e + own[..., None])
        reference = torch.zeros_like(own)
    else:
        reference = own.flip(-1).cummax(-1).values.flip(-1) if place.first else own.amax(-1, keepdim=True).expand_as(own)
        shift = (own[..., None] - reference[:, :, None, :] + b).float()
        codes = torch.where(seen, rounded(exp2(fma(y, rho, shift - m), kind), p_form["element"]), 0)
        reference = reference - b
    sums.d_v[back] += scaled(codes.transpose(-1, -2) @ sums.g2.values[at], reference[..., None])

    # dK: an outer exponent holds for the queries of one block
    query = saved.q2.exponent[at][..., None]
    payload, outer = _payload(ds_second, one, ds, sums.g.exponent[at], query, False, place.first)
    rounded_ds = {"dk": scaled(payload, outer - query)} if seen_by is not None else {}
    rows = ds_second["group"]["rows"] if outer.dim() else TILE
    for row in range(0, TILE, rows or TILE):
        part = payload[..., row:row + rows, :].transpose(-1, -2) @ saved.q2.values[at][..., row:row + rows, :]
        sums.d_k[back] += scaled(part, outer[..., row, :][..., None]) if outer.dim() else part

    # dQ
    key = saved.k2.exponent[back][:, :, None, :]
    payload, outer = _payload(ds_first, one, ds, sums.g.exponent[at], key, True, place.first)
    if seen_by is not None:
        seen_by.add(scaled(ds, sums.g.exponent[at][..., None]), rounded_ds | {"dq": scaled(payload, outer - key)})
    part = payload @ saved.k2.values[back]
    e = outer[..., 0] if outer.dim() else torch.zeros_like(sums.g.exponent[at])
    if sums.pre_scale is not None:
        part = scaled(part, (e + sums.pre_scale[at])[..., None]).half().float()
        sums.d_q[at] = (sums.d_q[at] + part).half().float()
    else:
        sums.d_q[at] += scaled(part, e[..., None])


def backward(d_out: Tensor, saved: Saved, tiles: Tiles, s: Settings, seen_by: Rounding | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(d_q, d_k, d_v) in the layout of Tiles.gather, float32."""
    recipe = s.recipe
    classical = {recipe["d_out"][use]["element"] for use in ("first", "second")} <= {"bf16", "int8"}
    d_o = d_out if classical else torch.where(saved.l[..., None] == 0, 0, d_out / saved.l[..., None])
    g, g2 = (quantise(d_o, recipe["d_out"][use], tiles) for use in ("first", "second"))
    d = (g.values * saved.out).sum(-1, keepdim=True)
    m = saved.m + torch.log2(saved.l.double()).float() if classical else saved.m
    if s.mistakes.get("backward_reference"):
        m = torch.ceil(m)
    pre_scale = _pre_scale(g, saved, tiles) if recipe["accumulation"]["dq_f16"] else None
    sums = Gradients(g, g2, d, m[..., None], pre_scale, *(torch.zeros_like(d_out) for _ in range(3)))
    if recipe.get("gradient_d") == "scores":
        mass, sum_rows = torch.zeros_like(d), _compiled(_row_sum_tile, d_out.device)
        sums.d.zero_()
        for step, at in enumerate(tiles.steps):
            sum_rows(saved, sums, mass, at, at - step, tiles.inside[at], Place.of(step), s)
        sums.d.copy_(torch.where(mass > 0, sums.d / mass, 0))
    run = _backward_tile if seen_by is not None else _compiled(_backward_tile, d_out.device)
    for step, at in enumerate(tiles.steps):
        run(saved, sums, at, at - step, tiles.inside[at], Place.of(step), s, seen_by)
    d_q, d_k, d_v = sums.d_q, sums.d_k, sums.d_v
    if pre_scale is not None:
        d_q = scaled(d_q, -pre_scale[..., None])
    if s.rotate:
        d_q, d_k = rotate_back(d_q), rotate_back(d_k)
    return d_q * s.scale, d_k * s.scale, d_v


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: Layer, tiles: Tiles) -> Tensor:
        ctx.kept, out = layer.forward((q, k, v), tiles)
        ctx.layer, ctx.tiles = layer, tiles
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.layer.backward(d_out, ctx.kept, ctx.tiles), None, None)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, s: Settings) -> tuple[Saved, Tensor]:
    """forward() of packed rows [tokens, heads, head_dim], in their dtype."""
    saved, out = forward(*(tiles.gather(x) for x in (q, k, v)), tiles, s)
    return saved, tiles.scatter(out).to(q.dtype)


def _packed_backward(d_out: Tensor, saved: Saved, tiles: Tiles, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (tiles.scatter(x).to(d_out.dtype) for x in backward(tiles.gather(d_out), saved, tiles, s))
    return d_q, d_k, d_v


def parse(argument: str) -> tuple[str, dict[str, str]]:
    """"mxfp8+ds=constant" -> ("mxfp8", {"ds": "constant"}); an error for what is not emulated."""
    recipe, *options = argument.split("+")
    if not recipe:
        raise ValueError("attention 'emulated' needs a recipe, for example --attention emulated:fp8-tensor")
    mistakes = dict(option.partition("=")[::2] for option in options)
    for name, value in mistakes.items():
        if value not in MISTAKES.get(name, ()):
            raise ValueError(f"attention 'emulated' has no option {name}={value}; it has "
                             + ", ".join(f"{n}={v}" for n, values in MISTAKES.items() for v in values))
    settings_of(recipe, 1.0, 128, mistakes)
    return recipe, mistakes


@torch.no_grad()
def ds_shares(argument: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, d_out: Tensor, scale: float) -> dict[str, float]:
    """ds_zeros, ds_lost (as flamia.stats counts them) and ds_error, the relative L2 error of the rounded dS, each for dq and dk."""
    recipe, mistakes = parse(argument)
    tiles, s = Tiles(cu_seqlens, q.shape[0]), settings_of(recipe, scale, q.shape[-1], mistakes)
    saved, _ = forward(*(tiles.gather(x) for x in (q, k, v)), tiles, s, once=True)
    seen = Rounding.none(q.device)
    backward(tiles.gather(d_out), saved, tiles, s, seen)
    return seen.shares()


@register("emulated")
def emulated(argument: str, row: int) -> Attention:
    """Any recipe that trains of E4M3 operands with power-of-two scales, NVFP4, INT8 or BF16, on the device of its input."""
    recipe, mistakes = parse(argument)  # a recipe that is not emulated fails now

    @functools.cache
    def layers(scale: float, head_dim: int, device: torch.device) -> Layers:
        s = settings_of(recipe, scale, head_dim, mistakes)
        passes = functools.partial(_packed_forward, s=s), functools.partial(_packed_backward, s=s)
        graphs = _backend(device) == "graphs" and not s.recipe["smoothing"]["k"]  # which counts documents on the host
        return Layers(*passes, row if graphs else None)

    @torch.compiler.disable
    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        if torch.get_float32_matmul_precision() != "highest":
            raise RuntimeError("attention 'emulated' needs torch.set_float32_matmul_precision('highest'); TF32 rounds differently")
        if q.shape != k.shape or q.shape != v.shape:
            raise NotImplementedError("the emulation has no grouped-query heads")
        with torch.autocast(q.device.type, enabled=False):
            return _Emulated.apply(q, k, v, *layers(scale, q.shape[-1], q.device).next(q, cu_seqlens))
    return attention
