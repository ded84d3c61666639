#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TorchTitan's own trainer on one GPU or on a CPU, for a few steps: a configuration of flamia.torchtitan trains on documents that its data loader packs.

    python3 experiments/torchtitan/reduced.py FOLDER --module flamia.torchtitan --config llama3_1b_mxfp8 --training.steps 8

The configuration is taken as it is (attention, checkpointing, optimizer, precision) but for sizes. On a GPU: 8 rows of 2048 tokens a step, the model
with its own widths and --layers of its layers (default: all). On a CPU: 2 layers of width 256, 4 rows of 256 tokens. Bytes are the tokens, and
the text is Python's own library. TorchTitan 0.3 takes a machine without an accelerator for one with CUDA; here it is told otherwise,
and its questions about the device's memory are answered. FOLDER gets tokenizer, text and logs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils

import flamia


class Cpu(types.ModuleType):
    """torch.cpu, and what the trainer asks of an accelerator besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: torch.device) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def write_assets(folder: Path) -> None:
    """A byte-level tokenizer, and short documents: the paragraphs of some modules' source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "text").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    parts = [part for module in (argparse, inspect, json, os) for part in inspect.getsource(module).split("\n\n") if part.strip()]
    (folder / "text/data.json").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("localhost", 0))
        return int(any_port.getsockname()[1])


def on_cpu() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: Cpu("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    told, rest = parser.parse_known_args()
    folder, gpu = told.folder.resolve(), torch.cuda.is_available()
    write_assets(folder)
    if not gpu:
        on_cpu()
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()),
                   "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    import torchtitan.train
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import model_registry
    as_told = ConfigManager.parse_args

    def reduced(manager: ConfigManager, *arguments: Any) -> Any:
        config = as_told(manager, *arguments)
        model = config.model_spec.model
        if gpu:
            model.layers = model.layers[:told.layers]
            return config
        small = model_registry("debugmodel", attn_backend="varlen")
        small.model.layers = small.model.layers[:told.layers or 2]
        for layer in small.model.layers:
            layer.attention.inner_attention = model.layers[0].attention.inner_attention
        config.model_spec = small
        return config

    ConfigManager.parse_args = reduced
    length, rows = ("2048", ("4", "8")) if gpu else ("256", ("2", "4"))
    sys.argv = ["train.py", "--hf_assets_path", str(folder), "--dataloader.dataset", "c4_test", "--dataloader.dataset_path", str(folder / "text"),
                "--dump_folder", str(folder / "out"), "--training.seq_len", length, "--training.local_batch_size", rows[0],
                "--training.global_batch_size", rows[1], "--metrics.log_freq", "1", *rest]
    with flamia.watch() as seen:
        torchtitan.train.main()
    print(f"{len(seen.calls)} forward passes of attention, {sum(call.d_out is not None for call in seen.calls)} with a backward pass")


if __name__ == "__main__":
    main()
