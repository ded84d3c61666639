#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains several attentions and seeds one after the other, in one process, and collects their figures.

    python3 experiments/gpt/runs.py --attention varlen flamia:mxfp8 flamia:mxfp8-exact --seeds 1 2 3 --out RUNS --results RESULTS \
        -- --steps 6000 --compile

All attentions of a seed come before the next seed. A run whose figures lie in --results is left alone and a cut one (--seconds, a crash)
goes on from its last checkpoint, so the same command finishes what is missing. Arguments after `--` go to train.py. A finished run leaves four files in --results,
run-NAME-seedN.json, train-, eval- and health-NAME-seedN.csv, which tools/plots/training.py makes a table of.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import re
import shutil
import time
from pathlib import Path

import torch

import train


def name_of(attention: str) -> str:
    """For files: varlen -> bf16, flamia:mxfp8 -> mxfp8, "emulated:mxfp8 p-in-ds=codes" -> emulated-mxfp8-p-in-ds-codes."""
    plain = "bf16" if attention == "varlen" else attention.removeprefix("flamia:")
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def finished(facts: Path, steps: int) -> bool:
    """Whether run.json tells of a run that made all its steps."""
    return facts.is_file() and json.loads(facts.read_text()).get("steps_done") == steps


def collect(folder: Path, results: Path, label: str) -> None:
    results.mkdir(parents=True, exist_ok=True)
    facts = json.loads((folder / "run.json").read_text())
    facts["arguments"] |= {"data": Path(facts["arguments"]["data"]).name, "out": folder.name}  # nothing of this machine's folders
    (results / f"run-{label}.json").write_text(json.dumps(facts, indent=1) + "\n")
    for part in ("train", "eval", "health"):
        shutil.copyfile(folder / f"{part}.csv", results / f"{part}-{label}.csv")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", nargs="+", required=True, help="as train.py takes it")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--out", type=Path, required=True, help="a folder for each run")
    add("--results", type=Path, required=True, help="figures of finished runs")
    add("--seconds", type=float, default=float("inf"), help="for all runs together; the run under way then stops with a checkpoint")
    add("--whole", action="store_true", help="start no run that would be cut: none that has less time left than the longest one took")
    add("rest", nargs="*", metavar="-- ARGUMENT", help="for train.py")
    args = parser.parse_args(argv)
    began, missing, longest = time.monotonic(), 0, 0.0
    train.read_documents = functools.lru_cache(train.read_documents)
    for seed in args.seeds:
        for attention in args.attention:
            label = f"{name_of(attention)}-seed{seed}"
            folder = args.out / label
            left = args.seconds - (time.monotonic() - began)
            more = ["--resume"] if (folder / "checkpoint.pt").is_file() else []
            told = train.arguments([*args.rest, "--attention", attention, "--seed", str(seed), "--out", str(folder),
                                    f"--max-seconds={max(0.0, left)}", *more])
            if finished(args.results / f"run-{label}.json", told.steps):
                continue
            if not finished(folder / "run.json", told.steps):
                if left <= (longest if args.whole else 0):
                    missing += 1
                    continue
                print(f"== {label}", flush=True)
                started = time.monotonic()
                torch.compiler.reset()  # torch.compile gives up on a function that it has compiled eight times
                gc.collect()
                torch.cuda.empty_cache()
                try:
                    train.train(told)
                except (RuntimeError, NotImplementedError, ValueError) as error:  # a diverged loss; no such attention, or not here
                    print(f"{label} failed: {error}", flush=True)
                longest = max(longest, time.monotonic() - started)
            if finished(folder / "run.json", told.steps):
                collect(folder, args.results, label)
            else:
                missing += 1
    print(f"{missing} runs are not finished" if missing else "all runs are finished", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
