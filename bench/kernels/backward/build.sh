#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the check and timing program of the backward kernel into the folder named as first argument (default: here). Further arguments go to nvcc.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${1:-$here}
[ $# -gt 0 ] && shift
kernels=$root/src/kernels/cuda/sm90
flags="-std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I$root/src -I$root/include -I$root/bench/kernels/backward $*"
mkdir -p "$out"
objects=
for source in "$kernels"/backward/*.cu "$kernels"/backward_ds16/*.cu "$kernels"/split/*.cu "$here"/main.cu; do
  object=$out/$(basename "$(dirname "$source")")_$(basename "$source" .cu).o
  objects="$objects $object"
  nvcc $flags -c "$source" -o "$object" &
  jobs=$((${jobs:-0} + 1))
  [ $((jobs % ${JOBS:-2})) -eq 0 ] && wait
done
wait
nvcc -gencode arch=compute_90a,code=sm_90a $objects -o "$out/backward"
