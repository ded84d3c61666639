#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures the attention operands of a trained model on one packed row of held-out documents.

    python3 experiments/gpt/capture.py --run RUN --data CORPUS --out data

For an early and a late layer: q, k (after the rotation) and v as the attention got them, and dout, the gradient of the
row's mean loss with respect to the attention's output, as the backward pass handed it over; nothing is rescaled. The row is
chosen by a rule that looks at document lengths only: the first held-out row with --min-documents to --max-documents
documents, none of a length that is a multiple of 32. Writes gpt-early.safetensors and gpt-late.safetensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import attention as attentions
from data import Packed, gather, read_documents
from model import GPT, Config, loss
from tap import Operands, Tap


def choose_row(held_out: Packed, fewest: int, most: int) -> tuple[int, np.ndarray]:
    """(offset in the stream, int32 cu_seqlens without empty documents) of the first row that fits the rule."""
    for batch in range(held_out.batches):
        for offset in held_out.row_offsets(batch):
            cu_seqlens = held_out.boundaries(np.array([offset]))
            lengths = np.diff(cu_seqlens)
            if fewest <= len(lengths) <= most and not np.any(lengths % 32 == 0):
                return int(offset), cu_seqlens
    raise ValueError(f"no held-out row has {fewest} to {most} documents; change --min-documents or --max-documents")


def capture(model: GPT, held_out: Packed, offset: int, cu_seqlens: np.ndarray, inner: attentions.Attention,
            dtype: torch.dtype) -> tuple[list[Operands], float]:
    """One forward and backward pass over the row; the operands of every layer, and the mean loss in nats per byte."""
    device = model.head.weight.device
    stream = torch.from_numpy(held_out.stream.copy()).to(device)
    batch = gather(stream, torch.tensor([offset], device=device), torch.from_numpy(cu_seqlens).to(device), held_out.row)
    tap = Tap(inner)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        value = loss(model, batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, tap)
    value.backward()
    return tap.calls, float(value.detach())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="folder that train.py wrote")
    add("--data", type=Path, required=True, help="the file that the run was trained on")
    add("--out", type=Path, required=True, help="folder for the two files")
    add("--early", type=int, default=0, help="index of the early layer, from 0")
    add("--late", type=int, default=-1, help="index of the late layer; -1 is the last one")
    add("--heads", type=int, nargs="+", default=[0, 3, 6])
    add("--min-documents", type=int, default=5)
    add("--max-documents", type=int, default=8)
    add("--attention", help="default: the one that the run was trained with")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    state = torch.load(args.run / "checkpoint.pt", map_location=args.device, weights_only=True)
    config, told = Config(**state["config"]), state["arguments"]
    model = GPT(config).to(args.device)
    model.load_state_dict(state["model"])
    if not all(0 <= head < config.heads for head in args.heads):
        parser.error(f"--heads {args.heads}: heads 0 to {config.heads - 1} are allowed")
    layers = {"early": args.early % config.layers, "late": args.late % config.layers}

    held_out = Packed(read_documents(args.data)[1], config.context, rows=1)
    offset, cu_seqlens = choose_row(held_out, args.min_documents, args.max_documents)
    name = args.attention or told["attention"]
    dtype = getattr(torch, told["dtype"])
    calls, value = capture(model, held_out, offset, cu_seqlens, attentions.make(name, config.context), dtype)

    args.out.mkdir(parents=True, exist_ok=True)
    for label, layer in layers.items():
        found = calls[layer]
        picked = {"q": found.q, "k": found.k, "v": found.v, "dout": found.o.grad}
        tensors = {key: x.detach()[:, args.heads].to(torch.bfloat16).contiguous().cpu() for key, x in picked.items()}
        tensors["cu_seqlens"] = torch.from_numpy(cu_seqlens)
        facts = {"source": f"flamia experiments/gpt on {args.data.name}, held-out split, byte {offset}",
                 "model": json.dumps(state["config"]), "seed": told["seed"], "steps": state["step"], "attention": name,
                 "layer": layer, "layers": config.layers, "heads": json.dumps(args.heads), "scale": config.scale,
                 "causal": "true", "loss": f"{value:.6f}",
                 "loss_kind": "mean over the row's tokens, nats per byte; dout is its gradient, not rescaled",
                 "positions": "rotary, from 0 in every document; q and k are after the rotation"}
        save_file(tensors, args.out / f"gpt-{label}.safetensors", {key: str(x) for key, x in facts.items()})
        sizes = ", ".join(f"rms {key} {float(x.float().square().mean().sqrt()):.3g}" for key, x in list(tensors.items())[:4])
        print(f"gpt-{label}: layer {layer}, heads {args.heads}, {sizes}")
    print(f"row at byte {offset}: loss {value:.4f}, document lengths {np.diff(cu_seqlens).tolist()}")


if __name__ == "__main__":
    main()
