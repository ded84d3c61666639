#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the emulated INT8 quantiser and kernels (recipe sagebwd) into the folder named first, beside the CPU backend of the static library named
# second (build/<preset>/src/libflamia.a of a build without CUDA). Needs g++, perl, googletest, fmt and the CUDA headers (CUDA_HOME, default
# /usr/local/cuda), no GPU and no nvcc. The sources are copied and rewritten in three places: kernel launches, block-shared arrays, the ptx headers.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
out=${1:?folder to build in}
library=${2:?libflamia.a of a build for CPUs}
copy=$out/src
kernels=$copy/kernels/cuda
rm -rf "$copy"
mkdir -p "$kernels/sm90/forward" "$kernels/sm90/backward" "$kernels/ptx" "$copy/quantize/cuda" "$copy/schedule/cuda"
cp -r "$root/src/numerics" "$copy"
cp "$root"/src/quantize/cuda/int8.cu "$root"/src/quantize/cuda/means.cu "$root"/src/quantize/cuda/*.hpp "$root"/src/quantize/cuda/*.cuh "$copy/quantize/cuda"
cp "$root"/src/schedule/cuda/*.hpp "$copy/schedule/cuda"
cp "$root"/src/schedule/*.hpp "$copy/schedule"
cp "$root/src/kernels/cuda/device_status.hpp" "$root/src/kernels/cuda/dense_strides.hpp" "$kernels"
cp "$root"/src/kernels/cuda/sm90/*.hpp "$root"/src/kernels/cuda/sm90/*.cuh "$kernels/sm90"
cp "$root"/src/kernels/cuda/sm90/forward/*.hpp "$root/src/kernels/cuda/sm90/forward/epilogue.cuh" "$kernels/sm90/forward"
cp "$root"/src/kernels/cuda/sm90/backward/*.hpp "$root/src/kernels/cuda/sm90/backward/rows_out.cuh" \
  "$root/src/kernels/cuda/sm90/backward/power.cuh" "$root/src/kernels/cuda/sm90/backward/rotation.cuh" "$kernels/sm90/backward"
cp -r "$root/src/kernels/cuda/sm90/int8" "$kernels/sm90"
for header in "$root"/src/kernels/cuda/ptx/*.cuh; do echo '#include "ptx_int8.hpp"' > "$kernels/ptx/$(basename "$header")"; done
sed -i 's/extern __shared__ std::uint8_t shared_memory\[\];/auto\& shared_memory = backward::shared_memory;/' "$kernels/sm90/int8/frame.cuh"
# of the forward kernel the epilogue alone
sed -i 's/#include "tile_output.cuh"/#include "config.hpp"\nnamespace flamia::sm90::forward {\ntemplate <class>\nstruct RowState {\n  float output[1], sum[2], reference[2];\n};\ninline float power_of_two(int e) { return __builtin_ldexpf(1.f, e); }\n}/' "$kernels/sm90/forward/epilogue.cuh"
sed -i 's/#include "fragments.hpp"//' "$kernels/sm90/backward/rows_out.cuh" "$kernels/sm90/backward/rotation.cuh"
sed -i 's/__shared__ alignas(16) Staging/static Staging/; s/__shared__ double/static double/; s/__shared__ int/static int/' "$copy/quantize/cuda/int8.cu" "$copy/quantize/cuda/means.cu"
sed -i '/__CUDACC__/d; /^#endif/d; s/__device__//' "$copy/quantize/cuda/signs.hpp"
perl -0pi -e 's/cudaFuncSetAttribute\(kKernel, /cudaFuncSetAttribute(static_cast<const void*>(nullptr), /' "$kernels/sm90/launch_persistent.cuh"
perl -0pi -e 's/(\w+(?:<[\w:, ]+>)?)\s*<<<\s*([^,]+),\s*((?:[^,<>]|\n)+),.*?>>>\((.*?)\);/EMULATE_LAUNCH($2, $3, $1($4));/gs' \
  "$kernels/sm90/launch_persistent.cuh" "$copy/quantize/cuda/int8.cu" "$copy/quantize/cuda/means.cu"
flags="-std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -mfma -w -I$here -I$here/../../backward/emulation -I$copy -I$root/include -I$root/tests -I$root/src -I${CUDA_HOME:-/usr/local/cuda}/include"
objects=
for source in "$kernels"/sm90/int8/*.cu "$copy/quantize/cuda/int8.cu" "$copy/quantize/cuda/means.cu"; do
  object=$out/$(basename "$source" .cu).o
  objects="$objects $object"
  ${CMAKE_CXX_COMPILER_LAUNCHER:-} g++ $flags -include "$here/ptx_int8.hpp" -x c++ -c "$source" -o "$object" &
  jobs=$((${jobs:-0} + 1))
  [ $((jobs % ${JOBS:-2})) -eq 0 ] && wait
done
${CMAKE_CXX_COMPILER_LAUNCHER:-} g++ $flags -c "$here/emulate.cpp" -o "$out/emulate.o"
wait
g++ "$out/emulate.o" $objects -o "$out/emulate" "$library" -lgtest -lfmt -lpthread -fopenmp
