# SPDX-License-Identifier: Apache-2.0
"""Speed from the rows of a benchmark (bench/results/*.csv): a picture and a Markdown table beside the CSV file.

Only rows of one run are compared (the last, or --run): clocks and power limits move a figure from day to day.

  bench.py FILE.csv [--run ISO_TIME] [--out FOLDER]
"""
from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import style
from style import Row, plt

COLUMNS = ("run", "commit", "gpu", "driver", "cuda", "clock_mhz", "workload", "heads", "key_heads", "head_dim", "mask", "mode",
           "implementation", "part", "ms", "tflops", "error")
PARTS = ("quantise", "forward", "inference", "backward", "call")
WORKLOADS = ("32x2048", "16x4096", "8x8192", "4x16384", "2x32768", "256x256", "8192+224x256", "manual_pages", "uniform_64_8192")
COLOURS = (style.BLUE, style.SKY, style.GREEN, style.BLACK)  # ours
PEER_COLOURS = (style.RED, style.ORANGE, style.PURPLE, style.GREY, style.YELLOW)


class Case(NamedTuple):
    """What is compared with each other besides the run."""
    heads: str
    key_heads: str
    head_dim: str
    mask: str
    mode: str

    def title(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.key_heads else f"{self.heads} query and {self.key_heads} key heads"
        return f"{self.mask}, {heads}, head dim {self.head_dim}, {self.mode}"


def cases(rows: list[Row]) -> Iterator[tuple[Case, list[Row]]]:
    of = [Case(*(row[name] for name in Case._fields)) for row in rows]
    for case in dict.fromkeys(of):
        yield case, [row for row, own in zip(rows, of) if own == case]


def is_ours(implementation: str) -> bool:
    return implementation.startswith("flamia")


def implementations(rows: Iterable[Row]) -> list[str]:
    """Ours first, each group in the order of the file."""
    return sorted(style.in_order([row["implementation"] for row in rows]), key=lambda name: not is_ours(name))


def workloads_of(rows: Iterable[Row]) -> list[str]:
    """The nine of bench/workloads.json in their order, then any others in the order of the file."""
    found = style.in_order([row["workload"] for row in rows])
    return sorted(found, key=lambda name: WORKLOADS.index(name) if name in WORKLOADS else len(WORKLOADS))


def parts_of(rows: list[Row]) -> list[str]:
    """Parts of which we have a figure: a peer alone is no comparison."""
    return [part for part in PARTS if any(row["part"] == part and is_ours(row["implementation"]) for row in rows)]


def cell(rows: list[Row], workload: str, implementation: str, part: str) -> Row | None:
    wanted = (workload, implementation, part)
    return next((row for row in rows if (row["workload"], row["implementation"], row["part"]) == wanted), None)


def table(case: Case, rows: list[Row]) -> Iterator[str]:
    names = implementations(rows)
    for part in parts_of(rows):
        own = [row for row in rows if row["part"] == part]
        columns = [name for name in names if any(row["implementation"] == name for row in own)]
        peers = [name for name in columns if not is_ours(name)]
        versus = bool(peers) and len(peers) < len(columns)
        yield f"\n### {part.capitalize()}: {case.title()}\n"
        head = ["workload", *columns, *(["ours against the fastest other"] if versus else [])]
        yield "| " + " | ".join(head) + " |"
        yield "|" + " --- |" * len(head)
        for workload in workloads_of(own):
            cells = {name: cell(own, workload, name, part) for name in columns}
            line = [workload, *(text(found) for found in cells.values())]
            if versus:
                ours = [float(row["ms"]) for name, row in cells.items() if row and is_ours(name)]
                others = [float(row["ms"]) for name, row in cells.items() if row and not is_ours(name)]
                line.append(f"{min(others) / min(ours):.2f}×" if ours and others else "–")
            yield "| " + " | ".join(line) + " |"
    known = "; ".join(errors(rows, names))
    yield "\nms (TFLOP/s)." + (f" Greatest error over the workloads: {known}." if known else "")


def text(row: Row | None) -> str:
    if not row:
        return "–"
    return f"{float(row['ms']):.2f}" + (f" ({float(row['tflops']):.0f})" if row["tflops"] else "")


def errors(rows: list[Row], names: list[str]) -> Iterator[str]:
    for name in names:
        for part in parts_of(rows):
            found = [float(row["error"]) for row in rows if row["implementation"] == name and row["part"] == part and row["error"]]
            if found:
                yield f"{name} {part} {max(found):.1e}"


def picture(rows: list[Row], case: Case, path: Path) -> None:
    """TFLOP/s by workload, one panel per part."""
    parts = [part for part in parts_of(rows) if any(row["part"] == part and row["tflops"] for row in rows)]
    if not parts:
        return
    names, workloads = implementations(rows), workloads_of(rows)
    ours, peers = iter(COLOURS), iter(PEER_COLOURS)
    colour = {name: next(ours if is_ours(name) else peers, style.GREY) for name in names}
    figure, axes = plt.subplots(1, len(parts), figsize=(4.2 * len(parts), 0.42 * len(workloads) + 1.3), sharey=True, squeeze=False)
    for axis, part in zip(axes[0], parts):
        axis.set_title(part.capitalize())
        axis.set_xlabel("TFLOP/s")
        axis.grid(axis="both")
        for name in names:
            found = [(float(row["tflops"]), y) for y, workload in enumerate(workloads)
                     if (row := cell(rows, workload, name, part)) and row["tflops"]]
            if found:
                x, y = zip(*found)
                axis.scatter(x, y, s=64 if is_ours(name) else 44, marker="o" if is_ours(name) else "D", color=colour[name],
                             label=name, zorder=3 if is_ours(name) else 2)
        axis.set_xlim(left=0)
    style.name_rows(axes[0][0], workloads)
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=min(len(handles), 6), bbox_to_anchor=(0.5, 0.94))
    figure.suptitle(f"{rows[0]['gpu']}, {case.title()}, run {rows[0]['run']}", y=-0.01, fontsize=9, color="#444444")
    figure.tight_layout()
    style.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--run", help="the run to show (default: the last)")
    parser.add_argument("--out", type=Path, help="folder (default: that of the CSV file)")
    options = parser.parse_args()
    rows = style.read(options.csv, *COLUMNS)
    run = options.run or max(row["run"] for row in rows)
    rows = [row for row in rows if row["run"] == run]
    if not rows:
        raise SystemExit(f"{options.csv} holds no run {run}")
    out = options.out or options.csv.parent
    first = rows[0]
    lines = [f"# {options.csv.stem}", "",
             f"Run {run}, commit {first['commit']}, {first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, "
             f"clock {clocks(rows)} MHz. Made by `scripts/figures` from {options.csv.name}."]
    for number, (case, own) in enumerate(cases(rows)):
        name = f"{options.csv.stem}-{number + 1}.png"
        picture(own, case, out / name)
        lines += ["", f"## {case.title()}", *([f"\n![TFLOP/s by workload]({name})"] if (out / name).exists() else []), *table(case, own)]
    absent = options.csv.with_suffix(".absent.txt")  # written by bench/peers/measure.py
    if absent.exists():
        lines += ["", "## Not measured", "", *(f"- {line}" for line in absent.read_text().splitlines())]
    (out / f"{options.csv.stem}.md").write_text("\n".join(lines) + "\n")
    print(out / f"{options.csv.stem}.md")


def clocks(rows: list[Row]) -> str:
    found = sorted({round(float(row["clock_mhz"])) for row in rows if row["clock_mhz"]})
    return "unknown" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"


if __name__ == "__main__":
    main()
