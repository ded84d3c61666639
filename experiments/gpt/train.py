#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the byte-level GPT on packed documents and reports the loss by its own attention and by exact attention.

    python3 experiments/gpt/train.py --data CORPUS --out RUN --attention varlen --compile

Writes into --out: train.csv (a line every --log-every steps), eval.csv, health.csv (see health.py), run.json (arguments, versions,
GPU) and checkpoint.pt. `--resume` goes on from checkpoint.pt; with --deterministic the result is that of an unbroken run, bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import attention as attentions
import health
from data import Packed, gather, read_documents
from model import GPT, Config, loss

TRAIN_COLUMNS = ["step", "tokens", "lr", "loss", "grad_norm", "grad_norm_max", "tokens_per_s"]
EVAL_COLUMNS = ["step", "tokens", "val_loss_own", "val_loss_exact", "attention"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    add = parser.add_argument
    add("--data", type=Path, default=here / "corpus/corpus.bin.xz", help="corpus file or plain text (enwik8)")
    add("--out", type=Path, default=here / "runs/default", help="folder of this run")
    add("--attention", default="varlen", help="name in attention.py: varlen, sdpa, exact, ...")
    add("--steps", type=int, default=6000)
    add("--max-seconds", type=float, default=math.inf, help="stop early, after the step at which this time has passed")
    add("--rows", type=int, default=16, help="packed rows of a step")
    add("--layers", type=int, default=Config.layers)
    add("--width", type=int, default=Config.width)
    add("--head-dim", type=int, default=Config.head_dim)
    add("--context", type=int, default=Config.context, help="tokens of a packed row")
    add("--qk-norm", action="store_true")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for the matrices of the blocks, AdamW for the rest")
    add("--lr", type=float, default=6e-4, help="peak; falls to a tenth along a cosine")
    add("--warmup", type=int, default=200, help="steps of linear warm-up")
    add("--weight-decay", type=float, default=0.1, help="of matrices; norms have none")
    add("--clip", type=float, default=1.0, help="greatest gradient norm")
    add("--seed", type=int, default=1, help="of the weights and of the order of rows")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the matrix products (weights: float32)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="torch.compile the training loss")
    add("--deterministic", action="store_true", help="only deterministic kernels; slower on a GPU")
    add("--log-every", type=int, default=20)
    add("--eval-every", type=int, default=1000)
    add("--eval-rows", type=int, default=256, help="held-out rows of an evaluation, always the first ones")
    add("--checkpoint-every", type=int, default=3000)
    add("--resume", action="store_true", help="go on from checkpoint.pt in --out")
    args = parser.parse_args(argv)
    for name in ("steps", "rows", "log_every", "eval_every", "eval_rows", "checkpoint_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    for name in ("eval_every", "checkpoint_every"):
        if getattr(args, name) % args.log_every:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a multiple of --log-every {args.log_every}")
    return args


def config_of(args: argparse.Namespace) -> Config:
    return Config(args.layers, args.width, args.head_dim, args.context, args.qk_norm)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Optimizers:
    """Several optimizers of different parameters as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, object]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])


def make_optimizer(model: GPT, args: argparse.Namespace) -> torch.optim.Optimizer | Optimizers:
    """AdamW, or Muon for the matrices inside the blocks and AdamW for the rest (with a step of AdamW's size, so one learning rate serves both)."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    inner = [p for p in model.blocks.parameters() if p.dim() == 2] if args.optimizer == "muon" else []
    outer = [p for p in matrices if all(p is not q for q in inner)]
    groups = [{"params": outer, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=args.device.startswith("cuda"))
    if not inner:
        return adamw
    return Optimizers(adamw, torch.optim.Muon(inner, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"))


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16")


@torch.no_grad()
def evaluate(model: GPT, held_out: Packed, stream: Tensor, attention: attentions.Attention, args: argparse.Namespace) -> float:
    """Mean loss, in nats per byte, over the first --eval-rows held-out rows (whole batches, as far as there are any)."""
    batches = max(1, min(args.eval_rows // args.rows, held_out.batches))
    plan = held_out.plan(0, batches).to(stream.device)
    total = torch.zeros((), device=stream.device, dtype=torch.float64)
    for offsets, cu_seqlens in zip(plan.offsets, plan.cu_seqlens, strict=True):
        batch = gather(stream, offsets, cu_seqlens, held_out.row)
        with autocast(args):
            total += loss(model, batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, attention)
    return float(total) / batches


class Table:
    """A CSV file that grows line by line; resuming drops the lines after the step resumed from."""

    def __init__(self, path: Path, columns: list[str], resumed_at: int | None) -> None:
        old = []
        if resumed_at is not None and path.exists():
            with path.open(newline="") as source:
                old = [line for line in csv.DictReader(source) if int(line["step"]) <= resumed_at]
        self.file = path.open("w", newline="")
        self.writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        self.writer.writeheader()
        self.writer.writerows(old)

    def add(self, **values: object) -> None:
        self.writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()})
        self.file.flush()


def save_checkpoint(path: Path, step: int, model: GPT, optimizer: torch.optim.Optimizer | Optimizers, args: argparse.Namespace) -> None:
    """Everything a resumed run needs; the data position is the step (see data.Packed)."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "config": dataclasses.asdict(model.config), "arguments": {k: str(v) for k, v in vars(args).items()},
             "rng_cpu": torch.get_rng_state(), "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_checkpoint(path: Path, model: GPT, optimizer: torch.optim.Optimizer | Optimizers, device: str) -> int:
    if not path.is_file():
        raise FileNotFoundError(f"--resume: there is no {path}; start without --resume")
    state = torch.load(path, map_location=device, weights_only=True)
    if state["config"] != dataclasses.asdict(model.config):
        raise ValueError(f"--resume: the checkpoint is of {state['config']}, "
                         f"this run asks for {dataclasses.asdict(model.config)}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng_cpu"].cpu())
    if state["rng_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([rng.cpu() for rng in state["rng_cuda"]])
    return int(state["step"])


def train(args: argparse.Namespace) -> dict[str, float]:
    """Runs the training; returns the figures of the last evaluation and the median speed."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    device, checkpoint = torch.device(args.device), args.out / "checkpoint.pt"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    train_documents, held_out_documents = read_documents(args.data)
    packed = Packed(train_documents, args.context, args.rows, args.seed)
    held_out = Packed(held_out_documents, args.context, args.rows)
    stream, held_out_stream = (torch.from_numpy(p.stream.copy()).to(device) for p in (packed, held_out))

    own, exact = attentions.make(args.attention, args.context), attentions.make("exact", args.context)
    model = GPT(config_of(args)).to(device)
    optimizer = make_optimizer(model, args)
    start = load_checkpoint(checkpoint, model, optimizer, args.device) if args.resume else 0
    step_loss = torch.compile(loss, dynamic=False) if args.compile else loss

    parameters = sum(p.numel() for p in model.parameters())
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    facts = {"arguments": {k: str(v) for k, v in vars(args).items()}, "parameters": parameters, "torch": torch.__version__,
             "gpu": gpu, "train_bytes": len(packed.stream), "held_out_bytes": len(held_out.stream),
             "steps_of_an_epoch": packed.batches, "resumed_at": start}
    (args.out / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{parameters / 1e6:.1f} M parameters, {len(packed.stream) / 1e6:.1f} MB of text, epoch of {packed.batches} steps, "
          f"attention {args.attention}, GPU {gpu}", flush=True)

    table = Table(args.out / "train.csv", TRAIN_COLUMNS, start if args.resume else None)
    evaluations = Table(args.out / "eval.csv", EVAL_COLUMNS, start if args.resume else None)
    healths = Table(args.out / "health.csv", health.COLUMNS, start if args.resume else None)
    tokens_of_a_step, speeds, result = args.rows * args.context, [], {}
    began = clock = time.perf_counter()
    step, stop = start, False
    while step < args.steps and not stop:
        count = min(args.log_every - step % args.log_every, args.steps - step)
        plan = packed.plan(step, count).to(device)
        losses, norms = torch.zeros(count, device=device), torch.zeros(count, device=device)
        for i in range(count):  # nothing in here waits for the device
            batch = gather(stream, plan.offsets[i], plan.cu_seqlens[i], args.context)
            rate = learning_rate(step + i, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with autocast(args):
                value = step_loss(model, batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, own)
            value.backward()
            norms[i] = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            losses[i] = value.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += count
        mean_loss, norm_list = float(losses.mean()), norms.tolist()
        now = time.perf_counter()
        speed, clock = count * tokens_of_a_step / (now - clock), now
        speeds.append(speed)
        table.add(step=step, tokens=step * tokens_of_a_step, lr=rate, loss=mean_loss, grad_norm=statistics.fmean(norm_list),
                  grad_norm_max=max(norm_list), tokens_per_s=round(speed))
        if not math.isfinite(mean_loss):
            raise RuntimeError(f"loss is {mean_loss} between steps {step - count} and {step}; see {args.out / 'train.csv'}")
        stop = now - began > args.max_seconds
        last = stop or step == args.steps
        if last or step % (10 * args.log_every) == 0:
            print(f"step {step:6} loss {mean_loss:.4f} grad norm {norm_list[-1]:.3f} lr {rate:.2e} "
                  f"{speed / 1e3:.0f} k tokens/s {now - began:.0f} s", flush=True)
        if last or step % args.eval_every == 0:
            result = {f"val_loss_{name}": evaluate(model, held_out, held_out_stream, function, args)
                      for name, function in (("own", own), ("exact", exact))}
            evaluations.add(step=step, tokens=step * tokens_of_a_step, attention=args.attention, **result)
            for line in health.measure(model, held_out, held_out_stream, args.attention, own, autocast(args)):
                healths.add(step=step, **line)
            print(f"step {step:6} held-out loss: own attention {result['val_loss_own']:.4f}, "
                  f"exact attention {result['val_loss_exact']:.4f}", flush=True)
        if last or step % args.checkpoint_every == 0:
            save_checkpoint(checkpoint, step, model, optimizer, args)
        clock = time.perf_counter()
    if stop and step < args.steps:
        print(f"stopped by --max-seconds after {step} of {args.steps} steps; the learning rate had not come down", flush=True)
    result["tokens_per_s"] = statistics.median(speeds) if speeds else math.nan
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    facts |= {"steps_done": step, "seconds": time.perf_counter() - began, "peak_gpu_bytes": peak, **result}
    (args.out / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        train(args)
    except (FileNotFoundError, ValueError, NotImplementedError) as error:  # wrong arguments: the messages are written for people
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
