// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX2, FMA and F16C (CMakeLists.txt).
#define FLAMIA_ISA avx2
#define FLAMIA_ISA_NAME "avx2"
#include "kernels/cpu/tile/code.hpp"
