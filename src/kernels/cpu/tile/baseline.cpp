// SPDX-License-Identifier: Apache-2.0
#define FLAMIA_ISA baseline
#define FLAMIA_ISA_NAME "baseline"
#include "kernels/cpu/tile/code.hpp"
