# SPDX-License-Identifier: Apache-2.0
"""Puts the forward kernel's table of a benchmark file into README.md, between the lines `<!-- forward table: begin -->` and `end -->`.

  readme.py FILE.csv README.md
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

import style
from bench import COLUMNS, cell, workloads_of

OURS = ("flamia mxfp8", "flamia mxfp8-exact")
PEERS = {"fa3fp8": "FA3 FP8", "fa3": "FA3 BF16"}


def table(path: Path) -> str:
    rows = style.read(path, *COLUMNS)
    run = max(row["run"] for row in rows)
    rows = [row for row in rows if row["run"] == run and row["mode"] == "burst" and row["part"] == "forward" and row["mask"] == "causal"
            and row["heads"] == row["key_heads"]]
    first = rows[0]
    head = ["workload", *(name.removeprefix("flamia ") for name in OURS), *PEERS.values(), "mxfp8 / FA3 FP8", "exact / FA3 FP8"]
    lines = [f"TFLOP/s of the forward kernel, {first['gpu']}, one run ({run}, commit {first['commit']}), causal, {first['heads']} heads, "
             f"d = {first['head_dim']}, 65,536 tokens, medians of single launches:", "",
             "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for workload in workloads_of(rows):
        found = [cell(rows, workload, name, "forward") for name in (*OURS, *PEERS)]
        speed = [float(row["tflops"]) if row else None for row in found]
        fa3_fp8 = speed[len(OURS)]
        ratios = [f"{x / fa3_fp8:.2f}" if x and fa3_fp8 else "–" for x in speed[:len(OURS)]]
        lines.append("| " + " | ".join([workload, *(f"{x:.0f}" if x else "–" for x in speed), *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    source, readme = Path(sys.argv[1]), Path(sys.argv[2])
    text = readme.read_text()
    new, count = re.subn(r"(<!-- forward table: begin -->\n).*?(<!-- forward table: end -->)",
                         lambda found: f"{found[1]}{table(source)}\n{found[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"{readme} has no place for the forward table (two comment lines, begin and end)")
    readme.write_text(new)
    print(readme)


if __name__ == "__main__":
    main()
