# SPDX-License-Identifier: Apache-2.0
"""Pictures from the CSV files of `flamia demo`: error and leak per recipe, and where the error of P sits.

  demo.py FOLDER    reads demo.csv, accuracy.csv and heatmap.csv there; writes recipes.png and heatmap-LAYER.png
"""
from __future__ import annotations

import argparse
import math
from pathlib import Path

import style
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from style import Row, plt

OUTPUTS = {"o": ("O", style.BLUE, "o"), "dq": ("dQ", style.RED, "s"), "dk": ("dK", style.ORANGE, "^"), "dv": ("dV", style.GREEN, "D")}
# Column of demo.csv, what the reader should call it, colour, marker
LEAKS = {
    "leak_o": ("O, from later tokens", style.BLUE, "o"),
    "leak_dq": ("dQ, from later tokens", style.RED, "s"),
    "look_back": ("dK, dV, from earlier queries", style.ORANGE, "^"),
    "documents": ("any, from other documents", style.BLACK, "X"),
}
TOKENS = 32  # edge of a block of heatmap.csv


def spread(index: int, count: int) -> float:
    """Vertical offset of the index-th of count marks in a row."""
    return (index - (count - 1) / 2) * 0.17


def mark(axis: Axes, x: float, y: float, text: str, colour: str, marker: str, filled: bool = True) -> None:
    """One value; the marks of the first recipe carry their names."""
    axis.scatter(x, y, color=colour, marker=marker, s=34, facecolors=colour if filled else "none", zorder=3)
    if y < 0.5:
        axis.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, color=colour)


def errors(axis: Axes, rows: list[Row], layer: str, recipes: list[str]) -> None:
    axis.set_title(f"Error, {layer} layer")
    for number, (name, (text, colour, marker)) in enumerate(OUTPUTS.items()):
        for y, recipe in enumerate(recipes):
            row = next(row for row in rows if (row["input"], row["recipe"], row["head"]) == (layer, recipe, "all"))
            mark(axis, float(row[f"{name}_rel_l2"]), y + spread(number, len(OUTPUTS)), text, colour, marker)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if value < 0.01 else f"{value:.0%}")
    axis.set_xlabel("relative L2 error")
    axis.grid(axis="x")


def leaks(axis: Axes, rows: list[Row], recipes: list[str]) -> None:
    """The greatest over the layers. Zero has its own place at the left: no bit changed."""
    zero, least, most = -8.0, -6.0, 0.8
    axis.set_title("Leak")
    for number, (name, (text, colour, marker)) in enumerate(LEAKS.items()):
        for y, recipe in enumerate(recipes):
            found = [float(row[name]) for row in rows if row["recipe"] == recipe]
            leak = math.inf if any(math.isnan(value) for value in found) else max(found)  # NaN in an output is the greatest change there is
            x = zero if leak == 0 else most if math.isinf(leak) else min(max(math.log10(leak), least), most)
            mark(axis, x, y + spread(number, len(LEAKS)), text, colour, marker, filled=leak != 0)
    axis.axvspan(zero - 0.8, zero + 0.8, color="#EAF4EC", zorder=0, lw=0)
    axis.set_xlim(zero - 0.8, 1)
    axis.set_xticks([zero, -6, -4, -2, 0], ["every bit\nequal", "10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    axis.set_xlabel("greatest change / greatest output")
    axis.grid(axis="x")


def picture_of_recipes(folder: Path) -> None:
    summary = style.read(folder / "demo.csv", "input", "recipe", *LEAKS)
    accuracy = style.read(folder / "accuracy.csv", "input", "recipe", "head", *(f"{name}_rel_l2" for name in OUTPUTS))
    layers, recipes = (style.in_order([row[column] for row in summary]) for column in ("input", "recipe"))
    figure, axes = plt.subplots(1, len(layers) + 1, figsize=(3.0 * len(layers) + 4.6, 0.72 * len(recipes) + 1.2), sharey=True,
                                gridspec_kw={"width_ratios": [3] * len(layers) + [4]}, layout="constrained")
    for axis, layer in zip(axes, layers):
        errors(axis, accuracy, layer, recipes)
    limits = [axis.get_xlim() for axis in axes[:-1]]
    for axis in axes[:-1]:
        axis.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    leaks(axes[-1], summary, recipes)
    style.name_rows(axes[0], recipes)
    for axis in axes:
        for y in range(1, len(recipes)):
            axis.axhline(y - 0.5, color="#E3E3E3", lw=0.8)
    style.save(figure, folder / "recipes.png")


def picture_of_p(folder: Path, layer: str) -> None:
    """Mean |P̂/l − P| by blocks of 32 queries × 32 keys, one panel per recipe."""
    rows = [row for row in style.read(folder / "heatmap.csv", "input", "recipe", "query_block", "key_block", "mean_error")
            if row["input"] == layer]
    recipes = style.in_order([row["recipe"] for row in rows])
    blocks = 1 + max(int(row["query_block"]) for row in rows)
    values = [float(row["mean_error"]) for row in rows if float(row["mean_error"]) > 0]
    norm = LogNorm(max(min(values), max(values) * 1e-6), max(values))
    figure, axes = plt.subplots(1, len(recipes), figsize=(3.1 * len(recipes) + 0.9, 3.5), sharey=True, squeeze=False,
                                layout="constrained")
    for axis, recipe in zip(axes[0], recipes):
        grid = [[math.nan] * blocks for _ in range(blocks)]
        for row in rows:
            if row["recipe"] == recipe:
                grid[int(row["query_block"])][int(row["key_block"])] = max(float(row["mean_error"]), norm.vmin)
        image = axis.imshow(grid, norm=norm, cmap="cividis", extent=(0, blocks * TOKENS, blocks * TOKENS, 0), interpolation="nearest")
        axis.set_title(recipe)
        axis.set_xlabel("key")
        axis.set_xticks(range(0, blocks * TOKENS + 1, 256))
        axis.set_yticks(range(0, blocks * TOKENS + 1, 256))
        axis.tick_params(length=3)
    axes[0][0].set_ylabel("query")
    bar = figure.colorbar(image, ax=axes[0].tolist(), shrink=0.85, pad=0.01)
    bar.set_label(r"mean $|\hat{P}/l - P|$")
    bar.outline.set_visible(False)
    style.save(figure, folder / f"heatmap-{layer}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    picture_of_recipes(folder)
    for layer in style.in_order([row["input"] for row in style.read(folder / "heatmap.csv", "input")]):
        picture_of_p(folder, layer)


if __name__ == "__main__":
    main()
