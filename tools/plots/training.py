# SPDX-License-Identifier: Apache-2.0
"""Table and picture of the training runs under experiments/gpt/results.

  training.py RESULTS [PAGE.md]    writes RESULTS/training.png; puts the table into PAGE.md between
                                   `<!-- training table: begin -->` and `<!-- training table: end -->`, else prints it

A run NAME-seedN is four files: run-NAME-seedN.json, train-, eval- and health-NAME-seedN.csv (health is optional), in RESULTS or a folder of it. Runs with
other steps or sizes than the first are not compared with it: they get a table of their own.
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
SAME = ("steps", "rows", "layers", "width", "head_dim", "context", "lr", "warmup", "clip", "qk_norm", "optimizer")


@dataclass
class Run:
    name: str
    seed: str
    facts: dict[str, Any]
    train: list[Row]
    evaluations: list[Row]
    health: list[Row]

    @property
    def group(self) -> tuple[str, ...]:
        return tuple(str(self.facts["arguments"].get(key, "adamw" if key == "optimizer" else None)) for key in SAME)

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


def tables(runs: list[Run]) -> str:
    texts = []
    for group in dict.fromkeys(run.group for run in runs):
        mine = [run for run in runs if run.group == group]
        cut = sorted({run.name for run in mine if not run.finished})
        if cut:  # then all are compared at the last evaluation that all have: they had the same learning rates so far
            common = max(set.intersection(*({int(row["step"]) for row in run.evaluations} for run in mine)))
            mine = [run.until(common) for run in mine]
        names = sorted({run.name for run in mine}, key=lambda name: (name != "bf16", name.startswith("emulated"), name))
        first, facts = mine[0].facts, dict(zip(SAME, group, strict=True))
        base = [float(run.evaluations[-1]["val_loss_exact"]) for run in mine if run.name == "bf16"]
        head = ["run", "seeds", "held-out loss, own attention", "by exact attention", "less BF16", "gradient norm, last sixth",
                "greatest after the first sixth", "cosine of dQ, one step", "zeros of dS", "lost", "error of dS", "tokens/s", "GB"]
        texts += [f"{facts['steps']} steps of {int(facts['rows']) * int(facts['context']):,} tokens, {facts['layers']} layers, width "
                  f"{facts['width']}, context {facts['context']}, {first['parameters'] / 1e6:.0f} M parameters, {facts['optimizer']}, learning rate {facts['lr']}, "
                  f"{first['gpu']}, PyTorch {first['torch']}{f', after step {common}' if cut else ''}:", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        texts += [line(name, [run for run in mine if run.name == name], statistics.fmean(base) if base and name != "bf16" else None)
                  for name in names]
        texts += ["", f"Cut before the last step (so all are compared at step {common}): {', '.join(cut)}." if cut else "", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(texts)).strip()


def picture(runs: list[Run], path: Path) -> None:
    runs = [run for run in runs if run.group == runs[0].group]
    names = list(dict.fromkeys(run.name for run in runs))
    figure, (loss, gap, norm) = plt.subplots(1, 3, figsize=(15, 4.5))
    for run in runs:
        colour, label = COLOURS[names.index(run.name) % len(COLOURS)], run.name if run is next(r for r in runs if r.name == run.name) else None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?")
    args = parser.parse_args()
    runs = read(args.results)
    picture(runs, args.results / "training.png")
    text = tables(runs)
    if args.page is None:
        print(text)
        return
    new, count = re.subn(r"(<!-- training table: begin -->\n).*?(<!-- training table: end -->)", lambda found: f"{found[1]}{text}\n{found[2]}",
                         args.page.read_text(), flags=re.S)
    if count != 1:
        raise SystemExit(f"{args.page} has no pair of lines `<!-- training table: begin -->` and `<!-- training table: end -->`")
    args.page.write_text(new)
    print(args.page)


if __name__ == "__main__":
    main()
