// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX-512 F, BW, DQ and VL (CMakeLists.txt).
#define FLAMIA_ISA avx512
#define FLAMIA_ISA_NAME "avx512"
#include "kernels/cpu/tile/code.hpp"
