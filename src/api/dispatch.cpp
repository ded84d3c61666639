// SPDX-License-Identifier: Apache-2.0
#include "api/dispatch.hpp"

namespace flamia::api {

const Backend* find_backend(Device device) {
  switch (device) {
    case Device::cpu:
      return &cpu_backend();
    case Device::cuda:
#if defined(FLAMIA_HAS_CUDA_BACKEND)
      return &cuda::backend();
#else
      return nullptr;
#endif
  }
  return nullptr;
}

}  // namespace flamia::api
