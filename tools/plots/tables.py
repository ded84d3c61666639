# SPDX-License-Identifier: Apache-2.0
"""Where the error of P sits, a picture from the heatmap.csv of `flamia tables`: a row for each input, a column for each recipe.

  tables.py FOLDER [--recipes A,B,...]    writes heatmaps.png there
"""
from __future__ import annotations

import argparse
import math
from pathlib import Path

import style
from matplotlib.colors import LogNorm
from style import Row, plt

TOKENS = 32  # edge of a block of heatmap.csv
RECIPES = "mxfp8,nvfp4,nvfp4-full,sage3,sage3-exact,sagebwd,hwfp4-direct,fp8-head"


def draw(rows: list[Row], recipes: list[str], file: Path) -> None:
    inputs = style.in_order([row["input"] for row in rows])
    largest = max(float(row["mean_error"]) for row in rows)
    norm = LogNorm(largest * 1e-5, largest)
    figure, axes = plt.subplots(len(inputs), len(recipes), figsize=(1.35 * len(recipes) + 1.6, 1.35 * len(inputs) + 0.4), squeeze=False,
                                layout="constrained")
    for line, name in zip(axes, inputs):
        for axis, recipe in zip(line, recipes):
            own = [row for row in rows if (row["input"], row["recipe"]) == (name, recipe)]
            if not own:  # a recipe that does not run on this input
                axis.set_axis_off()
                continue
            blocks = 1 + max(int(row["query_block"]) for row in own)
            grid = [[math.nan] * blocks for _ in range(blocks)]
            for row in own:
                grid[int(row["query_block"])][int(row["key_block"])] = max(float(row["mean_error"]), norm.vmin)
            image = axis.imshow(grid, norm=norm, cmap="cividis", extent=(0, blocks * TOKENS, blocks * TOKENS, 0), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(name, fontsize=8)
    for axis, recipe in zip(axes[0], recipes):
        axis.set_title(recipe, fontsize=8)
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.4, pad=0.01)
    bar.set_label(r"mean $|\hat{P}/l - P|$; queries down, keys to the right", fontsize=8)
    bar.outline.set_visible(False)
    style.save(figure, file)


def choose(asked: str | None, there: list[str]) -> list[str]:
    """The recipes to draw of those that the file has: the asked ones; or the usual ones, or else all."""
    if asked is None:
        return [recipe for recipe in RECIPES.split(",") if recipe in there] or there
    recipes = asked.split(",")
    if missing := [recipe for recipe in recipes if recipe not in there]:
        raise ValueError(f"--recipes: heatmap.csv has no {', '.join(missing)}; it has {', '.join(there)}")
    return recipes


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", help=f"default: those of {RECIPES} that the file has, or else all in it")
    arguments = parser.parse_args(argv)
    try:
        rows = style.read(arguments.folder / "heatmap.csv", "input", "recipe", "query_block", "key_block", "mean_error")
        recipes = choose(arguments.recipes, style.in_order([row["recipe"] for row in rows]))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    draw([row for row in rows if row["recipe"] in recipes], recipes, arguments.folder / "heatmaps.png")


if __name__ == "__main__":
    main()
