// SPDX-License-Identifier: Apache-2.0
// The nine workloads of ../../workloads.json, for the programs of these folders.
#pragma once
#include <vector>

namespace bench {

struct Workload {
  const char* name;
  std::vector<int> lengths;
};
inline std::vector<Workload> workloads() {
  std::vector<int> mixed(225, 256);
  mixed[0] = 8192;
  return {{"32x2048", std::vector<int>(32, 2048)},
          {"16x4096", std::vector<int>(16, 4096)},
          {"8x8192", std::vector<int>(8, 8192)},
          {"4x16384", std::vector<int>(4, 16384)},
          {"2x32768", std::vector<int>(2, 32768)},
          {"256x256", std::vector<int>(256, 256)},
          {"8192+224x256", mixed},
          {"manual_pages",
           {313,  1529, 13242, 756, 279, 4473, 1102, 1058, 717, 4303, 1228, 580,  518, 541,  290, 295, 555,  631,  354,
            1057, 1122, 659,   396, 737, 3798, 804,  993,  285, 364,  2257, 9905, 302, 4233, 535, 631, 1142, 2560, 992}},
          {"uniform_64_8192", {4689, 3643, 6960, 8176, 4173, 69, 7762, 4088, 5410, 4566, 2449, 4730, 200, 4995, 1848, 1778}}};
}

inline double flops(const Workload& w, int heads, int d, bool causal) {
  double total = 0;
  for (double length : w.lengths) total += 4.0 * length * length * d * heads / (causal ? 2 : 1);
  return total;
}

}  // namespace bench
