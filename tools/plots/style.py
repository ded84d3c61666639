# SPDX-License-Identifier: Apache-2.0
"""What the pictures share: colours (Okabe and Ito, safe for colour-blind readers), fonts, reading CSV files, saving."""
from __future__ import annotations

import csv
import sys
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("error: the pictures need matplotlib; apt-get install python3-matplotlib, or pip install matplotlib")

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8A8A8A"

Row = dict[str, str]

plt.rcParams.update({
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "ytick.major.size": 0,
    "legend.frameon": False,
})


def read(path: Path, *columns: str) -> list[Row]:
    """Rows of a CSV file; says which of the expected columns it lacks."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise SystemExit(f"{path} holds no rows")
    if missing := [name for name in columns if name not in rows[0]]:
        raise SystemExit(f"{path} has no column {', '.join(missing)}; it has {', '.join(rows[0])}")
    return rows


def in_order(values: list[str]) -> list[str]:
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def name_rows(axes: Axes, names: list[str]) -> None:
    """Names down the vertical axis, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(path)
