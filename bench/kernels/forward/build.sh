#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds check, time and layout_speed into $1 (default ./build). Fails when ptxas serialises a product (C7510-C7514) or reports more spills
# than allowed. Extra compiler flags: FLAGS, e.g. FLAGS=-DFLAMIA_WATCHDOG.
set -e
here=$(cd "$(dirname "$0")" && pwd); src=$here/../../../src/kernels/cuda/sm90/forward; out=${1:-$here/build}; jobs=${JOBS:-1}
mkdir -p "$out"
nv="nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a -lineinfo -cudart static $FLAGS"
compile() {  # object source
  if ! $nv -Xptxas -v -c "$2" -o "$1" 2>"$1.log"; then cat "$1.log"; exit 1; fi
  if grep -E "C75(10|11|12|14)" "$1.log"; then echo "serialised products in $2"; rm -f "$1"; exit 1; fi
}
list="$src/launch.cu $src/instance_d128_block.cu $src/instance_d128_token.cu $src/instance_d64_block.cu $src/instance_d64_token.cu
      $src/instance_d128_nvfp4.cu $src/instance_d64_nvfp4.cu $here/line.cu $here/check.cu $here/time.cu $here/layout_speed.cu"
objects=
for file in $list; do
  object=$out/$(basename "$file" .cu).o
  if [ "$jobs" -gt 1 ]; then compile "$object" "$file" & else compile "$object" "$file"; fi
done
wait
for o in launch line instance_d128_block instance_d128_token instance_d64_block instance_d64_token instance_d128_nvfp4 \
         instance_d64_nvfp4; do objects="$objects $out/$o.o"; done
$nv -o "$out/check" "$out/check.o" $objects
$nv -o "$out/time" "$out/time.o" $objects -ldl
$nv -o "$out/layout_speed" "$out/layout_speed.o"
grep -hE "entry function|spill|registers" "$out"/instance*.log | sed 's/.*forward14forward_kernel/kernel /' | paste - - - | sed 's/ptxas info *://g' | cut -c1-240
