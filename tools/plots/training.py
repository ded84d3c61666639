# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the training runs under experiments/gpt/results.

  training.py RESULTS [PAGE.md]    writes RESULTS/training.png, and RESULTS/mistakes.png if there are runs of a second size; puts the tables into
                                   PAGE.md between `<!-- training table: begin -->` and `<!-- training table: end -->`, else prints them
  training.py --steps SPEED.csv [PAGE.md]    the same with what speed.py measured, between `<!-- step table: begin -->` and `... end -->`

A run NAME-seedN is four files: run-NAME-seedN.json, train-, eval- and health-NAME-seedN.csv (health is optional), in RESULTS or a folder of it. Runs of
another length or size than the first are not compared with it: they get a table of their own, and so have runs that were cut. Of one size, the optimizer and
learning rate with the most runs have the table; a table of losses compares all of them.
"""
from __future__ import annotations

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import style
from style import Row, plt

COLOURS = (style.BLACK, style.BLUE, style.GREEN, style.RED, style.ORANGE, style.PURPLE, style.SKY, style.YELLOW, style.GREY)
SIZE = ("steps", "rows", "layers", "width", "head_dim", "context", "warmup", "clip", "qk_norm")


@dataclass
class Run:
    name: str
    seed: str
    facts: dict[str, Any]
    train: list[Row]
    evaluations: list[Row]
    health: list[Row]

    @property
    def size(self) -> tuple[str, ...]:
        return tuple(str(self.facts["arguments"].get(key)) for key in SIZE)

    @property
    def setting(self) -> tuple[str, float]:
        told = self.facts["arguments"]
        return told.get("optimizer", "adamw"), float(told["lr"])

    @property
    def exact(self) -> float:
        return float(self.evaluations[-1]["val_loss_exact"])

    def until(self, step: int) -> Run:
        """As it was after that step."""
        parts = ([row for row in rows if int(row["step"]) <= step] for rows in (self.train, self.evaluations, self.health))
        return Run(self.name, self.seed, self.facts, *parts)

    @property
    def finished(self) -> bool:
        return str(self.facts.get("steps_done")) == self.facts["arguments"]["steps"]


def read(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.rglob("run-*.json"), key=lambda path: (len(path.parts), path)):
        if not (found := re.fullmatch(r"run-(.+)-seed(\d+)", path.stem)):
            raise SystemExit(f"{path}: a run is called run-NAME-seedN.json")
        part = path.stem.removeprefix("run-")
        health = path.with_name(f"health-{part}.csv")
        runs.append(Run(found[1], found[2], json.loads(path.read_text()), style.read(path.with_name(f"train-{part}.csv"), "step", "grad_norm"),
                        style.read(path.with_name(f"eval-{part}.csv"), "step", "val_loss_own", "val_loss_exact"),
                        style.read(health, "step", "layer") if health.exists() else []))
    if not runs:
        raise SystemExit(f"{folder} holds no run-*.json; experiments/gpt/train.py writes them")
    return runs


def spread(values: list[float], digits: int) -> str:
    """Mean, and with several seeds the distance to the furthest one."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {max(abs(v - mean) for v in values):.{digits}f}"


def last_health(run: Run, column: str) -> float | None:
    """Of the worse of the two layers at the end."""
    values = [float(row[column]) for row in run.health if row["step"] == run.health[-1]["step"] and row.get(column)]
    return (min if column.startswith("cos") else max)(values) if values else None


def line(name: str, runs: list[Run], baseline: float | None) -> str:
    def all_of(value: Any) -> list[float]:
        return [x for x in map(value, runs) if x is not None]

    exact = all_of(lambda r: float(r.evaluations[-1]["val_loss_exact"]))
    gap = "–" if baseline is None else f"{statistics.fmean(exact) - baseline:+.4f}"
    late = all_of(lambda r: statistics.fmean(float(row["grad_norm"]) for row in r.train[-len(r.train) // 6:]))
    peak = all_of(lambda r: max(float(row["grad_norm_max"]) for row in r.train[len(r.train) // 6:]))
    zeros, lost, error = (all_of(lambda r, column=column: last_health(r, column)) for column in ("ds_zeros_dq", "ds_lost_dq", "ds_error_dq"))
    cosine = all_of(lambda r: last_health(r, "cos_dq"))
    memory = all_of(lambda r: r.facts.get("peak_gpu_bytes"))
    return (f"| {name} | {len(runs)} | {spread(all_of(lambda r: float(r.evaluations[-1]['val_loss_own'])), 4)} | {spread(exact, 4)} | {gap} | "
            f"{statistics.fmean(late):.3f} | {max(peak):.2f} | {f'{statistics.fmean(cosine):.4f}' if cosine else '–'} | "
            f"{f'{max(zeros):.0%}' if zeros else '–'} | {f'{max(lost):.0e}' if lost else '–'} | {f'{max(error):.3f}' if error else '–'} | {statistics.median(all_of(lambda r: r.facts['tokens_per_s'])) / 1000:.0f} k | "
            f"{f'{max(memory) / 1e9:.1f}' if memory else '–'} |")


def order(names: set[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "bf16", name.startswith("emulated"), name))


def of_setting(runs: list[Run]) -> tuple[list[Run], tuple[str, float]]:
    """Those of the optimizer and learning rate that most have."""
    setting = statistics.mode(run.setting for run in runs)
    return [run for run in runs if run.setting == setting], setting


def head(run: Run, setting: tuple[str, float], step: int) -> str:
    told, (optimizer, rate) = run.facts["arguments"], setting
    return (f"{told['steps']} steps of {int(told['rows']) * int(told['context']):,} tokens, {told['layers']} layers, width {told['width']}, context "
            f"{told['context']}, {run.facts['parameters'] / 1e6:.0f} M parameters, {optimizer}, learning rate {rate:g}, {run.facts['gpu']}, PyTorch "
            f"{run.facts['torch']}{'' if step == int(told['steps']) else f', after step {step}'}:")


COLUMNS = ("run", "seeds", "held-out loss, own attention", "by exact attention", "less BF16", "gradient norm, last sixth",
           "greatest after the first sixth", "cosine of dQ, one step", "zeros of dS", "lost", "error of dS", "tokens/s", "GB")


def comparison(runs: list[Run], setting: tuple[str, float]) -> list[str]:
    step = int(runs[0].evaluations[-1]["step"])
    base = [run.exact for run in runs if run.name == "bf16"]
    lines = [line(name, [run for run in runs if run.name == name], statistics.fmean(base) if base and name != "bf16" else None)
             for name in order({run.name for run in runs})]
    return [head(runs[0], setting, step), "", f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS), *lines, ""]


def settings(runs: list[Run]) -> list[str]:
    """Losses by exact attention for every optimizer and learning rate that more than one attention was trained with."""
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for run in runs:
        found.setdefault(run.setting, {}).setdefault(run.name, []).append(run.exact)
    found = {setting: losses for setting, losses in found.items() if "bf16" in losses and len(losses) > 1}
    if len(found) < 2:
        return []
    names = [name for name in order(set.union(*map(set, found.values()))) if name != "bf16" and all(name in losses for losses in found.values())]
    lines = []
    for (optimizer, rate), losses in sorted(found.items()):
        base = statistics.fmean(losses["bf16"])
        lines.append(f"| {optimizer} | {rate:g} | {spread(losses['bf16'], 4)} | "
                     + " | ".join(f"{spread(losses[name], 4)} | {statistics.fmean(losses[name]) - base:+.4f}" for name in names) + " |")
    columns = ("optimizer", "learning rate", "bf16", *(part for name in names for part in (name, "less BF16")))
    return ["The same model with other optimizers and learning rates, held-out loss by exact attention:", "", f"| {' | '.join(columns)} |",
            "|" + " --- |" * len(columns), *lines, ""]


def tables(runs: list[Run]) -> str:
    texts: list[str] = []
    for size in dict.fromkeys(run.size for run in runs):
        same = [run for run in runs if run.size == size]
        mine, setting = of_setting(same)
        if whole := [run for run in mine if run.finished]:
            texts += comparison(whole, setting)
        if cut := [run for run in mine if not run.finished]:  # compared where all of them were, with those that had the same learning rates so far
            group = cut + [run for run in whole if run.name in ("bf16", "mxfp8")]
            common = max(set.intersection(*({int(row["step"]) for row in run.evaluations} for run in group)))
            texts += comparison([run.until(common) for run in group], setting)
        texts += settings([run for run in same if run.finished])
    return re.sub(r"\n{3,}", "\n\n", "\n".join(texts)).strip()


def colour_of(names: list[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def picture(runs: list[Run], path: Path) -> None:
    names = list(dict.fromkeys(run.name for run in runs))
    figure, (loss, gap, norm) = plt.subplots(1, 3, figsize=(15, 4.5))
    for run in runs:
        colour, label = colour_of(names, run.name), run.name if run is next(r for r in runs if r.name == run.name) else None
        steps = [int(row["step"]) for row in run.evaluations]
        loss.plot(steps, [float(row["val_loss_exact"]) for row in run.evaluations], color=colour, label=label, marker="o", markersize=3)
        gap.plot(steps, [float(row["val_loss_exact"]) - float(row["val_loss_own"]) for row in run.evaluations], color=colour, marker="o", markersize=3)
        norm.semilogy([int(row["step"]) for row in run.train], [float(row["grad_norm"]) for row in run.train], color=colour, linewidth=0.8)
    for axis, title in ((loss, "Held-out loss by exact attention, nats per byte"), (gap, "Exact less own attention: what a kernel leaks"),
                        (norm, "Gradient norm")):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(axis="y")
    loss.legend()
    style.save(figure, path)


def mistakes(runs: list[Run], path: Path) -> None:
    """How far each kind of run ends from BF16, against the one-step figures that might foretell it; and the cosine of dQ on the way."""
    base = [run.exact for run in runs if run.name == "bf16"]
    names = [name for name in order({run.name for run in runs}) if name != "bf16"]
    if not base or not names:
        return
    middle, noise = statistics.fmean(base), max(base) - min(base)
    figure, grid = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    axes = grid.flat
    for name in names:
        mine, colour, marker = [run for run in runs if run.name == name], colour_of(names, name), "os^"[names.index(name) // len(COLOURS)]
        loss = statistics.fmean(run.exact for run in mine) - middle
        for axis, column in zip(axes, ("ds_zeros_dq", "ds_lost_dq", "ds_error_dq", "cos_dq"), strict=False):
            if values := [x for x in (last_health(run, column) for run in mine) if x is not None]:
                x = statistics.fmean(values)
                axis.plot(1 - x if column == "cos_dq" else x, loss, marker, color=colour, label=name)
        for run in mine[:1]:
            worst = {row["step"]: min(float(r["cos_dq"]) for r in run.health if r["step"] == row["step"]) for row in run.health}
            axes[4].semilogy([int(step) for step in worst], [1 - x for x in worst.values()], color=colour, marker=marker, markersize=4)
    for axis, title in zip(axes, ("Zeros of dS", "Lost: share of the sum of |dS|", "L2 error of dS", "1 - cosine of dQ"), strict=False):
        axis.axhspan(-noise / 2, noise / 2, color=style.GREY, alpha=0.25)
        axis.set_title(title)
        axis.set_ylabel("loss less BF16's")
        axis.set_xscale("symlog", linthresh=1e-6 if title.startswith("Lost") else 1e-3)
        axis.grid(axis="y")
    axes[4].set_title("1 - cosine of dQ on the way")
    axes[4].set_xlabel("step")
    axes[5].axis("off")
    axes[5].legend(*axes[3].get_legend_handles_labels(), loc="center left")
    style.save(figure, path)


def steps(path: Path) -> str:
    rows = style.read(path, "attention", "length", "ms", "peak_gb", "watched_ms")
    base = {row["length"]: float(row["ms"]) for row in reversed(rows)}  # of the first attention
    columns = ("documents of", "attention", "ms a step", "of BF16's", "tokens/s", "GB", "ms of a watched step")
    lines = [f"| {row['length']} | {row['attention'].removeprefix('flamia:').replace('varlen', 'bf16')} | {float(row['ms']):.1f} | "
             f"{float(row['ms']) / base[row['length']]:.2f} | {int(row['tokens_per_s']) // 1000} k | {row['peak_gb']} | {row['watched_ms'] or '–'} |" for row in rows]
    return "\n".join([f"{rows[0]['gpu']}, PyTorch {rows[0]['torch']}, {int(rows[0]['tokens']):,} tokens a step:", "", f"| {' | '.join(columns)} |",
                      "|" + " --- |" * len(columns), *lines])


def put(text: str, page: Path | None, name: str) -> None:
    if page is None:
        print(text)
        return
    new, count = re.subn(rf"(<!-- {name} table: begin -->\n).*?(<!-- {name} table: end -->)", lambda found: f"{found[1]}{text}\n{found[2]}",
                         page.read_text(), flags=re.S)
    if count != 1:
        raise SystemExit(f"{page} has no pair of lines `<!-- {name} table: begin -->` and `<!-- {name} table: end -->`")
    page.write_text(new)
    print(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="RESULTS is a file of speed.py")
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?")
    args = parser.parse_args()
    if args.steps:
        put(steps(args.results), args.page, "step")
        return
    runs = read(args.results)
    sizes = list(dict.fromkeys(run.size for run in runs))
    picture(of_setting([run for run in runs if run.size == sizes[0]])[0], args.results / "training.png")
    if len(sizes) > 1:
        mistakes([run for run in of_setting([run for run in runs if run.size == sizes[1]])[0] if run.finished], args.results / "mistakes.png")
    put(tables(runs), args.page, "training")


if __name__ == "__main__":
    main()
