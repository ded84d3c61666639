# SPDX-License-Identifier: Apache-2.0
"""Cuts FlashInfer down to its packed BF16 prefill on Hopper, compiled, for a machine that can fetch and compile nothing.

    PYTHONPATH=SITE python3 bench/peers/cut_flashinfer.py CUT [--head-dim 128]

SITE: flashinfer-python and what it needs. CUT then holds the Python files that importing it loads and the compiled kernels where FlashInfer
looks for those of its own wheel. No GPU is needed; nvcc 13 and ninja are.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"

import flashinfer
import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module

# Of the kernels only these: packed, full (0) and causal (1). What they leave undefined is paged and never called; it is bound when called.
SOURCES = ("ragged_sm90_kernel_mask_0", "ragged_sm90_kernel_mask_1", "sm90", "sm90_jit_binding")


def compiled(head_dim: int) -> tuple[str, pathlib.Path]:
    """Name of the module and its shared library."""
    bf16 = torch.bfloat16
    spec = gen_batch_prefill_module("fa3", bf16, bf16, bf16, torch.int32, head_dim, head_dim, 0, False, False, False)
    spec.write_ninja()
    objects = [spec.build_dir / f"{spec.name}_batch_prefill_{part}.cuda.o" for part in SOURCES]
    subprocess.run(["ninja", "-C", spec.build_dir, *objects], check=True)
    library = spec.build_dir / "cut.so"
    subprocess.run(["c++", "-shared", "-Wl,-z,lazy", *objects, "-L/usr/local/cuda/lib64", "-L/usr/local/cuda/lib64/stubs", "-lcudart", "-lcuda", "-o", library],
                   check=True)
    return spec.name, library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cut", type=pathlib.Path)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    name, library = compiled(options.head_dim)
    package = pathlib.Path(flashinfer.__file__).parent
    files = [pathlib.Path(module.__file__) for key, module in sys.modules.items()
             if key.split(".")[0] == "flashinfer" and getattr(module, "__file__", None)]
    files += (package / "data" / "csrc").glob("batch_prefill*sm90*")  # read to name the module, not to compile it
    for file in files:
        kept = options.cut / "flashinfer" / file.relative_to(package)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, kept)
    place = options.cut / "flashinfer" / "data" / "aot" / name
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, place / f"{name}.so")
    print(f"{len(files)} files of {flashinfer.__version__} and {name}.so: {options.cut}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
