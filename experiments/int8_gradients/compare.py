#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What INT8 costs the gradients of `sagebwd`, on the CPU backend, as Markdown: relative L2 error of O, dQ, dK, dV

  by product   one of the six products in INT8 and the rest in BF16; all of them; all but one
  by length    of a document, N(0,1)
  by depth     through all layers of a model: every layer's attention in INT8, gradients of q, k, v against those of exact attention
  smoothing    means of K, of Q, of both, of neither: what the codes of Q and K alone cost, and the recipes

  FLAMIA_LIBRARY=.../libflamia.so PYTHONPATH=python experiments/int8_gradients/compare.py [RUN CORPUS] > experiments/int8_gradients/results.md

RUN is a folder of experiments/gpt/train.py and CORPUS its data; without them there is no part by depth.
"""
from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import flamia
import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
DIM, HEADS = 128, 2
NAMES = ("O", "dQ", "dK", "dV")
# the two operands of each product, as fields of a recipe's JSON
PRODUCTS = {"S": ("q.first", "k.first"), "O": ("p.first", "v.first"), "dP": ("d_out.first", "v.second"), "dV": ("p.second", "d_out.second"),
            "dQ": ("d_s.first", "k.second"), "dK": ("d_s.second", "q.second")}
IN_INT8 = ("S", "O", "dV", "dQ", "dK")  # of sagebwd; its dP is a product of dO and what O's codes of V stand for, in BF16
ALL_INT8 = "sagebwd do1=int8/128xall/f32/amax dov-bf16=off"

Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of o, [tokens, heads, d]


def with_products(*kept: str, same_v: bool = False) -> str:
    """JSON of sagebwd with these products in INT8 and the others in BF16; same_v: dP takes the V of O, as sagebwd does, not V itself."""
    made = json.loads(flamia.Recipe(ALL_INT8).to_json())
    plain = json.loads(flamia.Recipe("bf16").to_json())["q"]["first"]
    for product, operands in PRODUCTS.items():
        for operand in operands if product not in kept else ():
            name, use = operand.split(".")
            made[name][use] = plain
    made["d_out_times_v_bf16"] = "dP" not in kept
    if same_v:
        made["v"]["second"] = made["v"]["first"]
    made["one_ds_payload"] = made["d_s"]["first"] == made["d_s"]["second"]
    return json.dumps(made)


def exact(operands: Operands, lengths: list[int], scale: float) -> list[Tensor]:
    """O, dQ, dK, dV in float64."""
    leaves = [x.double().requires_grad_() for x in operands[:3]]
    outs, start = [], 0
    for n in lengths:
        q, k, v = (x[start:start + n] for x in leaves)
        hidden = torch.ones(n, n).triu(1).bool()
        p = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(hidden, -math.inf).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", p, v))
        start += n
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, operands[3].double())]


def attend(operands: Operands, lengths: list[int], scale: float, recipe: str) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in operands[:3]]
    made = flamia.Recipe.from_json(recipe) if recipe.startswith("{") else recipe
    out = flamia.attention(*leaves, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), scale=scale, recipe=made)
    return [out.detach(), *torch.autograd.grad(out, leaves, operands[3])]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def row(label: str, errors: list[float]) -> None:
    print(f"| {label} | " + " | ".join(f"{x:.4f}" for x in errors) + " |", flush=True)


def header(*columns: str) -> None:
    print("\n| " + " | ".join(columns) + " |\n| " + " | ".join("---" for _ in columns) + " |")


def normal(tokens: int, seed: int = 1) -> Operands:
    random = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(tokens, HEADS, DIM, generator=random).bfloat16() for _ in range(4))
    return q, k, v, g


def shipped(layer: str) -> tuple[Operands, list[int], float]:
    path = ROOT / f"data/gpt-{layer}.safetensors"
    x = load_file(path)
    return (x["q"], x["k"], x["v"], x["dout"]), x["cu_seqlens"].diff().tolist(), x["q"].shape[-1] ** -0.5


# ---- by product and by length ----

def by_product() -> None:
    print("\n## By product\n\nMeans of K subtracted in all rows.")
    everything = {"none (BF16)": with_products()} | {f"{p} alone" + ("" if p in IN_INT8 else " (not in `sagebwd`)"): with_products(p) for p in PRODUCTS}
    everything["O alone, dP of the same V"] = with_products("O", same_v=True)
    everything |= {f"`sagebwd` but {p}": with_products(*(x for x in IN_INT8 if x != p), same_v=p != "O") for p in IN_INT8}
    everything |= {"`sagebwd`": "sagebwd", "`sagebwd v2=bf16`: dP of V itself": "sagebwd v2=bf16", "all six": ALL_INT8}
    inputs = {"N(0,1), 1,024 tokens": (normal(1024), [1024], DIM ** -0.5), "first layer of the GPT": shipped("early"), "last layer": shipped("late")}
    for name, (operands, lengths, scale) in inputs.items():
        wanted = exact(operands, lengths, scale)
        header(f"{name}: products in INT8", *NAMES)
        for label, recipe in everything.items():
            row(label, [error(a, b) for a, b in zip(attend(operands, lengths, scale, recipe), wanted, strict=True)])


def by_length() -> None:
    print("\n## By length\n\nN(0,1), one document.")
    recipes = {"S": with_products("S"), "O": with_products("O"), "dV": with_products("dV"), "dQ": with_products("dQ"), "dK": with_products("dK"),
               "`sagebwd`": "sagebwd", "`mxfp8-exact`": "mxfp8-exact"}
    for which in range(1, 4):
        header(f"error of {NAMES[which]}, tokens", *(name if name.startswith("`") else f"{name} alone" for name in recipes))
        for tokens in (256, 512, 1024, 2048, 4096):
            operands = normal(tokens)
            wanted = WANTED.setdefault(tokens, exact(operands, [tokens], DIM ** -0.5))
            found = FOUND.setdefault(tokens, {name: attend(operands, [tokens], DIM ** -0.5, recipe) for name, recipe in recipes.items()})
            row(f"{tokens:,}", [error(found[name][which], wanted[which]) for name in recipes])


WANTED: dict[int, list[Tensor]] = {}
FOUND: dict[int, dict[str, list[Tensor]]] = {}


# ---- by depth ----

def by_depth(run: Path, corpus: Path) -> None:
    sys.path.insert(0, str(ROOT / "experiments/gpt"))
    import attention as attentions  # noqa: F401 -- registers them
    from data import Packed, gather, read_documents
    from model import GPT, Config, loss
    from registry import make

    state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    model, told = GPT(Config(**state["config"])), state["arguments"]
    model.load_state_dict(state["model"])
    held_out = Packed(read_documents(corpus)[1], model.config.context, rows=8)
    offsets = torch.from_numpy(held_out.row_offsets(0))
    cu_seqlens = torch.from_numpy(held_out.boundaries(offsets.numpy()))
    batch = gather(torch.from_numpy(held_out.stream.copy()), offsets, cu_seqlens, held_out.row)

    def gradients(inner: Callable[..., Tensor]) -> list[list[Tensor]]:
        """Of q, k, v of every layer, of the mean loss of the row."""
        kept: list[list[Tensor]] = []

        def tap(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
            kept.append([q, k, v])
            return inner(q, k, v, cu, scale)
        value = loss(model, batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, tap)
        flat = torch.autograd.grad(value, [x for layer in kept for x in layer])
        return [list(flat[i:i + 3]) for i in range(0, len(flat), 3)]

    def recipe(name: str) -> Callable[..., Tensor]:
        return lambda q, k, v, cu, scale: flamia.attention(q, k, v, cu, scale=scale,
                                                           recipe=flamia.Recipe.from_json(name) if name.startswith("{") else name)
    wanted = gradients(make("exact", held_out.row))
    names = {"`sagebwd`": "sagebwd", "dP of V itself": "sagebwd v2=bf16", "forward alone (S, O)": with_products("S", "O", same_v=True), "backward alone (dV, dQ, dK)": with_products("dV", "dQ", "dK"),
             "no K smoothing": "sagebwd smooth-k=off", "dP in INT8 too": ALL_INT8, "`mxfp8-exact`": "mxfp8-exact", "`bf16`": "bf16"}
    found = {label: gradients(recipe(name)) for label, name in names.items()}
    print(f"\n## By depth\n\nA GPT of {model.config.layers} layers, width {model.config.width}, heads of {model.config.head_dim}, after {told['steps']} steps; 8 held-out rows of "
          f"{held_out.row} packed tokens. All layers' attention has the recipe, the rest is float32; the gradient comes from the last layer.")
    for which, name in enumerate(NAMES[1:]):
        header(f"error of {name}, layer", *names)
        for layer in range(model.config.layers):
            row(str(layer + 1), [error(found[label][layer][which], wanted[layer][which]) for label in names])


# ---- smoothing of Q ----

def int8(x: Tensor, tokens: int) -> Tensor:
    """[tokens, heads, d], a scale for `tokens` tokens x all channels."""
    blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % tokens)).unflatten(0, (-1, tokens))
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 127).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).flatten(0, 1)[:len(x)]


def smoothed(operands: Operands, scale: float, smooth_q: bool, smooth_k: bool, mean_of_codes: bool) -> list[Tensor]:
    """O, dQ, dK, dV of one document in float64 but for INT8 codes of Q and K, in S, dQ and dK. mean_of_codes: Q's mean meets what K's codes stand
    for, as in the library's training, not K itself."""
    q, k, v, g = (x.double() for x in operands)
    n = len(q)
    means = torch.stack([q[i:i + 128].mean(0) for i in range(0, n, 128)]).repeat_interleave(128, 0)[:n] if smooth_q else torch.zeros_like(q)
    k_codes = int8(k - k.mean(0), 64) if smooth_k else int8(k, 64)
    k_near = k - k.mean(0) if smooth_k else k
    q_codes = int8(q - means, 128)
    s = torch.einsum("ihd,jhd->hij", q_codes, k_codes) + torch.einsum("ihd,jhd->hij", means, k_codes if mean_of_codes else k_near)
    p = (s * scale).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
    o = torch.einsum("hij,jhd->ihd", p, v)
    ds = p * (torch.einsum("ihd,jhd->hij", g, v) - (g * o).sum(-1).T[..., None])
    # dQ: a mean of K meets the sum of a row of dS, which is 0; dK: the means of Q are added back
    return [o, torch.einsum("hij,jhd->ihd", ds, k_codes) * scale, torch.einsum("hij,ihd->jhd", ds, q_codes + means) * scale,
            torch.einsum("hij,ihd->jhd", p, g)]


def smoothing() -> None:
    print("\n## Smoothing\n\nQ and K in INT8 (products S, dQ, dK), all else in float64: what the codes of Q and K alone cost.")
    common = normal(1024)
    for x in common[:2]:
        x[..., ::5] += 6
    outlier = normal(1024)
    outlier[1][..., 7] *= 30
    inputs = {"N(0,1)": normal(1024), "6 added to every fifth channel of Q and K": common, "channel 7 of K times 30": outlier}
    for layer in ("early", "late"):
        operands, lengths, _ = shipped(layer)
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        start = sum(lengths[:longest])
        inputs["first layer of the GPT" if layer == "early" else "last layer"] = tuple(x[start:start + lengths[longest]] for x in operands)
    exacts = {name: exact(operands, [len(operands[0])], DIM ** -0.5) for name, operands in inputs.items()}
    forms = {"none": (False, False, False), "K": (False, True, False), "Q": (True, False, True), "Q, its mean times K itself": (True, False, False),
             "Q and K": (True, True, True), "Q and K, Q's mean times K itself": (True, True, False)}
    header("input", "means taken off", *NAMES)
    for name, operands in inputs.items():
        for label, form in forms.items():
            row(f"{name} | {label}", [error(a, b) for a, b in zip(smoothed(operands, DIM ** -0.5, *form), exacts[name], strict=True)])
    print("\nThe recipes, all products as they have them:")
    header("input", "recipe", *NAMES)
    for name, operands in inputs.items():
        for recipe in ("sagebwd smooth-k=off", "sagebwd", "sagebwd smooth-q=on smooth-k=off", "sagebwd smooth-q=on", "sagebwd d=scores",
                       "sagebwd d=scores smooth-q=on"):
            row(f"{name} | `{recipe}`", [error(a, b) for a, b in zip(attend(operands, [len(operands[0])], DIM ** -0.5, recipe), exacts[name], strict=True)])


def main() -> None:
    torch.manual_seed(0)
    print("Made by `experiments/int8_gradients/compare.py` on the CPU backend. Relative L2 error against float64 attention on the operands as given.")
    by_product()
    by_length()
    smoothing()
    if len(sys.argv) == 3:
        by_depth(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
