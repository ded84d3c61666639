#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the comparison of schedules into $1 (default ./build).
set -e
here=$(cd "$(dirname "$0")" && pwd); out=${1:-$here/build}
mkdir -p "$out"
nvcc -O3 -std=c++20 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -cudart static -o "$out/schedule" \
  "$here/main.cu" "$here/../../../src/kernels/cuda/sm90/forward/launch.cu" \
  "$here"/../../../src/kernels/cuda/sm90/forward/instance_d*.cu
