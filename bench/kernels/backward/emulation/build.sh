#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the emulated backward pass into the folder named as argument. Needs g++, perl and the CUDA headers (CUDA_HOME, default
# /usr/local/cuda), no GPU and no nvcc. The sources are copied and rewritten in three places: kernel launches, block-shared arrays, the ptx headers.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
out=${1:?folder to build in}
copy=$out/src
kernels=$copy/kernels/cuda
rm -rf "$copy"
mkdir -p "$kernels/sm90/forward" "$kernels/ptx" "$copy/quantize/cuda" "$out/bench"
cp -r "$root/src/numerics" "$copy"
cp "$root/src/quantize/cuda/prescale.hpp" "$copy/quantize/cuda"
cp "$root/src/kernels/cuda/sm90/layout.hpp" "$root/src/kernels/cuda/sm90/launch_persistent.cuh" "$root/src/kernels/cuda/sm90/values16.cuh" \
  "$root/src/kernels/cuda/sm90/nvfp4_values.cuh" "$kernels/sm90"
cp "$root"/src/kernels/cuda/sm90/forward/*.hpp "$kernels/sm90/forward"
cp -r "$root/src/kernels/cuda/sm90/backward" "$root/src/kernels/cuda/sm90/backward_ds16" "$root/src/kernels/cuda/sm90/split" "$kernels/sm90"
cp "$here"/../*.cuh "$out/bench"
for header in barrier bulk_copy convert grid half matrix mma_f16 reduce registers wgmma wgmma_backward wgmma_bf16 wgmma_f16 wgmma_split; do
  echo '#include "ptx.hpp"' > "$kernels/ptx/$header.cuh"
done
cd "$kernels/sm90"
sed -i 's/__shared__ int totals/static int totals/' backward/prepare.cu backward_ds16/prepare.cu
sed -i 's/extern __shared__ std::uint8_t shared_memory\[\];/auto\& shared_memory = backward::shared_memory;/' split/*_kernel.cuh
sed -i 's/extern __shared__ __align__(128) std::uint8_t shared_memory\[\];/auto\& shared_memory = backward::shared_memory;/' backward/finish.cu
sed -i 's/extern __shared__ __align__(1024) std::uint8_t shared_memory\[\];/auto\& shared_memory = backward::shared_memory;/' backward_ds16/kernel.cuh backward_ds16/query_kernel.cuh
perl -0pi -e 's/cudaFuncSetAttribute\(kKernel, /cudaFuncSetAttribute(static_cast<const void*>(nullptr), /' launch_persistent.cuh
perl -0pi -e 's/(\w+(?:<[\w:, ]+>)?)\s*<<<\s*([^,]+),\s*([^,]+),.*?>>>\((.*?)\);/EMULATE_LAUNCH($2, $3, $1($4));/gs' backward/prepare.cu backward_ds16/prepare.cu backward/finish.cu launch_persistent.cuh
cd "$out/bench"
perl -0pi -e 's/<<<.*?>>>\(/(/gs' problem.cuh check.cuh reference.cuh
flags="-std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -mfma -w -I$here -I$copy -I$root/include -I$out/bench -I${CUDA_HOME:-/usr/local/cuda}/include"
objects=
for source in "$kernels"/sm90/backward/*.cu "$kernels"/sm90/backward_ds16/*.cu "$kernels"/sm90/split/*.cu; do
  object=$out/$(basename "$(dirname "$source")")_$(basename "$source" .cu).o
  objects="$objects $object"
  ${CMAKE_CXX_COMPILER_LAUNCHER:-} g++ $flags -include "$here/ptx.hpp" -x c++ -c "$source" -o "$object" &
  jobs=$((${jobs:-0} + 1))
  [ $((jobs % ${JOBS:-2})) -eq 0 ] && wait
done
${CMAKE_CXX_COMPILER_LAUNCHER:-} g++ $flags -c "$here/emulate.cpp" -o "$out/emulate.o"
wait
g++ "$out/emulate.o" $objects -o "$out/emulate"
