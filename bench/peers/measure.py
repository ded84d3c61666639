# SPDX-License-Identifier: Apache-2.0
"""Measures attention peers on the packed workloads and appends rows to the CSV that `flamia bench` writes.

    python3 bench/peers/measure.py --csv bench/results/run.csv --run 2026-11-29T23:00:00Z --commit abc1234
            [--workloads 16x4096,256x256] [--heads 16] [--key-heads 16] [--mask causal|full] [--mode burst|sustained] [--peers fa3,fa4]

All peers come from wheels. One that is not installed, or cannot run a workload, is named with its reason, never skipped in silence:
on standard output, and in FILE.absent.txt beside the rows, from which `scripts/figures` takes it into the tables.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from common import Absent, Inputs, Rows, clock_mhz, forward_flops, machine, workloads
from cudnn_fp8 import cudnn_fp8
from flash_peers import fa3, fa3_fp8, fa4, flashinfer
from torch_peers import cudnn_bf16, varlen

PEERS = {"cudnn": cudnn_bf16, "cudnnfp8": cudnn_fp8, "varlen": varlen, "fa3": fa3, "fa3fp8": fa3_fp8, "fa4": fa4,
         "flashinfer": flashinfer}
NEEDS_BLACKWELL = ("cudnn MXFP8", "FlashAttention-4 FP8", "FLAMIA's own kernels", "HW-FP4 FA4")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--run", required=True, help="ISO time shared by everything measured side by side")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--workloads", help="comma-separated names; default: all nine")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--mode", choices=("burst", "sustained"), default="burst")
    parser.add_argument("--seed", type=int, default=None, help="default: fresh")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    known = workloads()
    chosen = options.workloads.split(",") if options.workloads else list(known)
    unknown = [n for n in chosen if n not in known] + [p for p in options.peers.split(",") if p not in PEERS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; workloads are {', '.join(known)}; peers are {', '.join(PEERS)}", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else torch.seed() % 2**31
    key_heads = options.key_heads or options.heads
    rows = Rows(options.csv, run=options.run, commit=options.commit, **machine())
    absent: dict[tuple[str, str], str] = {}
    for workload in chosen:
        x = Inputs(known[workload], options.heads, key_heads, options.head_dim, options.mask, seed)
        reference = x.reference()
        flops = forward_flops(x.lengths, options.heads, options.head_dim, options.mask)
        for peer in options.peers.split(","):
            print(f"{workload}: {peer}", file=sys.stderr, flush=True)
            try:
                result = PEERS[peer](x, options.mode)
            except Absent as reason:
                absent[peer, workload] = f"absent, {reason}"
                continue
            except Exception as error:  # a peer that fails is a result too
                absent[peer, workload] = f"failed, {error!r}"[:300].replace("\n", " ")
                continue
            fixed = dict(workload=workload, heads=options.heads, key_heads=key_heads, head_dim=options.head_dim, mask=options.mask,
                         mode=options.mode, implementation=peer, clock_mhz=clock_mhz())
            rows.add(**fixed, part="forward", ms=f"{result.forward_ms:.4f}", tflops=f"{flops / result.forward_ms / 1e9:.1f}",
                     error=x.error(result.tensors[:1], reference))
            if result.backward_ms is not None:
                rows.add(**fixed, part="backward", ms=f"{result.backward_ms:.4f}",
                         tflops=f"{2.5 * flops / result.backward_ms / 1e9:.1f}",
                         error=x.error(result.tensors[1:], reference[1:] if reference else None))
                call = result.forward_ms + result.backward_ms
                rows.add(**fixed, part="call", ms=f"{call:.4f}", tflops=f"{3.5 * flops / call / 1e9:.1f}", error="")
            torch.cuda.empty_cache()
    report(options, absent)
    return 0


def report(options: argparse.Namespace, absent: dict[tuple[str, str], str]) -> None:
    """One line a peer and reason, with the workloads that it is true of."""
    workloads_of: dict[tuple[str, str], list[str]] = {}
    for (peer, workload), why in absent.items():
        workloads_of.setdefault((peer, why), []).append(workload)
    grouped = "" if options.key_heads in (None, options.heads) else f", {options.heads} query and {options.key_heads} key heads"
    case = f"{options.mask}, {options.mode}{grouped}"
    lines = [f"{peer} ({case}): {why}: {', '.join(names)}" for (peer, why), names in workloads_of.items()]
    lines.append("needs Blackwell: " + ", ".join(NEEDS_BLACKWELL))
    path = pathlib.Path(options.csv).with_suffix(".absent.txt")
    known = path.read_text().splitlines() if path.exists() else []
    path.write_text("\n".join([*known, *(line for line in lines if line not in known)]) + "\n")
    for line in lines:
        print("#", line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
