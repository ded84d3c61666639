# SPDX-License-Identifier: Apache-2.0
"""Puts a benchmark file's picture and its tables of the training call and of the forward kernel into README.md, between the lines
`<!-- speed: begin -->` and `end -->`.

  readme.py FILE.csv README.md
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

import style
from bench import COLUMNS, cell, is_ours, workloads_of
from style import Row

OURS = {"flamia mxfp8": "mxfp8", "flamia mxfp8-exact": "mxfp8-exact"}
PEERS = {"fa3": "FA3 BF16", "fa3fp8": "FA3 FP8", "fa4": "FA4 BF16", "cudnn": "cuDNN BF16", "cudnnfp8": "cuDNN FP8", "varlen": "torch varlen",
         "flashinfer": "FlashInfer"}


def markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *("| " + " | ".join(line) + " |" for line in lines)]


def ratio(found: Row | None, peer: Row | None) -> str:
    """How many times faster than the peer."""
    return f"{float(peer['ms']) / float(found['ms']):.2f}" if found and peer else "–"


def call_table(rows: list[Row]) -> list[str]:
    """Milliseconds of the whole training call; the fastest peer by name, and how many times faster each of ours is."""
    lines = []
    for workload in workloads_of(rows):
        ours = [cell(rows, workload, name, "call") for name in OURS]
        fa3 = cell(rows, workload, "fa3", "call")
        others = [row for row in rows if row["workload"] == workload and row["part"] == "call" and not is_ours(row["implementation"])]
        best = min(others, key=lambda row: float(row["ms"]), default=None)
        lines.append([workload, *(f"{float(row['ms']):.2f}" if row else "–" for row in (*ours, fa3)),
                      f"{float(best['ms']):.2f} ({PEERS[best['implementation']]})" if best else "–", *(ratio(row, best) for row in ours)])
    return markdown(["workload", *OURS.values(), PEERS["fa3"], "fastest other", *(f"fastest other / {name}" for name in OURS.values())], lines)


def forward_table(rows: list[Row]) -> list[str]:
    """TFLOP/s of the forward kernel beside FlashAttention-3's two."""
    lines = []
    for workload in workloads_of(rows):
        ours = [cell(rows, workload, name, "forward") for name in OURS]
        peers = [cell(rows, workload, name, "forward") for name in ("fa3fp8", "fa3")]
        lines.append([workload, *(f"{float(row['tflops']):.0f}" if row else "–" for row in (*ours, *peers)), *(ratio(row, peers[0]) for row in ours)])
    return markdown(["workload", *OURS.values(), PEERS["fa3fp8"], PEERS["fa3"], *(f"{name} / FA3 FP8" for name in OURS.values())], lines)


def block(path: Path, readme: Path) -> str:
    rows = style.read(path, *COLUMNS)
    run = max(row["run"] for row in rows)
    rows = [row for row in rows if row["run"] == run and row["mode"] == "burst" and row["mask"] == "causal" and row["heads"] == row["key_heads"]]
    first = rows[0]
    picture = path.with_name(f"{path.stem}-1.png").resolve().relative_to(readme.resolve().parent)
    return "\n".join([
        f"{first['gpu']}, one run ({run}, commit {first['commit']}), causal, {first['heads']} heads, d = {first['head_dim']}, 65,536 tokens, medians of single launches.",
        "", f"![TFLOP/s of the forward pass, the backward pass and the whole call, by workload]({picture})",
        "", "Whole training call, quantisation included, ms:", "", *call_table(rows),
        "", "Forward kernel, TFLOP/s:", "", *forward_table(rows)])


def main() -> None:
    source, readme = Path(sys.argv[1]), Path(sys.argv[2])
    text = readme.read_text()
    new, count = re.subn(r"(<!-- speed: begin -->\n).*?(<!-- speed: end -->)", lambda found: f"{found[1]}{block(source, readme)}\n{found[2]}", text,
                         flags=re.S)
    if count != 1:
        raise SystemExit(f"{readme} has no place for the tables (two comment lines, begin and end)")
    readme.write_text(new)
    print(readme)


if __name__ == "__main__":
    main()
