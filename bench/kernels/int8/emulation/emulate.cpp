// SPDX-License-Identifier: Apache-2.0
// The INT8 quantiser and kernels of recipe sagebwd, thread by thread on a CPU, against the CPU backend: relative L2 of O, dQ, dK, dV.
// Arguments: number of a case, "all", or "control" (the CPU computes another recipe: fails); a factor for Q, a power of two (64: scores of hundreds).
#include "kernels/cuda/sm90/int8/int8.hpp"

#include <cstdlib>
#include <cstring>

#include "kernels/attention_case.hpp"
#include "ptx_int8.hpp"
#include "quantize/cuda/int8.hpp"

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
}

namespace flamia::test {
namespace {

namespace int8 = sm90::int8;
using quantize::gpu::Int8Params;

constexpr double kParity = 4e-3;  // as tests/gpu/int8_test.cpp

/// Memory full of NaN, as nobody may count on more.
template <class T>
T* memory(std::size_t n) {
  const std::size_t bytes = (n * sizeof(T) + 511) / 256 * 256;
  void* const made = std::aligned_alloc(256, bytes);
  std::memset(made, 0xff, bytes);
  return static_cast<T*>(made);
}

std::uint16_t* bf16(const std::vector<float>& x) {
  auto* const made = memory<std::uint16_t>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) made[i] = numerics::encode_bf16(x[i]);
  return made;
}

void require(bool good, const char* what) {
  if (good) return;
  std::printf("%s failed\n", what);
  std::exit(1);
}

/// The schedule that a call makes on a GPU.
struct Schedule {
  std::vector<sm90::Document> documents;
  std::vector<schedule::gpu::TokenBlock> blocks;
  std::vector<sm90::WorkItem> forward, backward;

  explicit Schedule(const Input& in) {
    int slot = 0;
    for (int b = 0; b < in.problem.documents; ++b) {
      const int start = static_cast<int>(in.cu_seqlens[b]), length = static_cast<int>(in.cu_seqlens[b + 1]) - start;
      documents.push_back({slot, start, length});
      for (int at = 0; at < length; at += 32) blocks.push_back({start + at, slot + at, at, length});
      for (int at = 0; at < length; at += int8::kForwardTile) forward.push_back({b, at});
      for (int at = 0; at < length; at += int8::kBlock) backward.push_back({b, at});
      slot += (length + 15) / 16 * 16;
    }
    for (int tail = 0; tail < 8; ++tail) blocks.push_back({0, slot + 32 * tail, 0, 0});
  }
};

struct Call {
  const Input& in;
  const Problem& p = in.problem;
  const bool smooth;
  const int d = p.head_dim;
  Schedule schedule{in};
  std::int64_t slots = sm90::slot_capacity(p.tokens, p.documents);
  std::size_t query_slots = static_cast<std::size_t>(slots * p.query_heads),
              key_slots = static_cast<std::size_t>(slots * p.key_heads);
  float* score = memory<float>(query_slots);
  float* m = memory<float>(query_slots);
  float* l = memory<float>(query_slots);
  std::uint16_t* o = bf16(std::vector<float>(in.q.size(), 0.f));
  std::uint16_t* values = memory<std::uint16_t>(key_slots * static_cast<std::size_t>(d));
  std::int32_t counters[2] = {0, 0};
  std::int32_t forward_items = static_cast<std::int32_t>(schedule.forward.size());
  std::int32_t backward_items = static_cast<std::int32_t>(schedule.backward.size());

  Int8Params quantiser(const std::vector<float>& x, int heads) {
    const std::size_t n = static_cast<std::size_t>(slots * heads), elements = n * static_cast<std::size_t>(d);
    Int8Params made;
    made.input = {bf16(x), DType::bf16};
    made.heads = heads;
    made.head_dim = d;
    made.rows = memory<std::uint8_t>(elements);
    made.transposed = memory<std::uint8_t>(elements);
    made.scales = memory<float>(n / int8::kScaleSlots);
    made.slots = slots;
    made.blocks = schedule.blocks.data();
    made.block_capacity = static_cast<std::int64_t>(schedule.blocks.size());
    return made;
  }
  static int8::Operand operand(const Int8Params& from) { return {from.rows, from.transposed, from.scales}; }

  void fill(int8::Problem& made) {
    made.documents = schedule.documents.data();
    made.counter = counters;
    made.slots = slots;
    made.tokens = p.tokens;
    made.head_dim = d;
    made.query_heads = p.query_heads;
    made.key_heads = p.key_heads;
    made.softmax_scale = 1.f / std::sqrt(static_cast<float>(d));
    made.window_left = static_cast<int>(p.mask.left);
    made.window_right = p.mask.causal ? 0 : static_cast<int>(p.mask.right);
  }

  Result run() {
    Int8Params q = quantiser(in.q, p.query_heads), k = quantiser(in.k, p.key_heads), v = quantiser(in.v, p.key_heads);
    if (smooth) {
      quantize::gpu::MeanParams means;
      means.input = k.input;
      means.heads = p.key_heads;
      means.head_dim = d;
      means.slots = slots;
      means.documents = schedule.documents.data();
      means.document_capacity = p.documents;
      means.means = memory<float>(key_slots / sm90::kSlotAlign * static_cast<std::size_t>(d));
      require(quantize::gpu::launch_means(means, nullptr).ok(), "means");
      q.key_means = k.means = means.means;
      q.key_heads = p.key_heads;
      q.key_mean_score = score;
    }
    v.rows16 = values;
    v.decoded = true;
    for (const Int8Params* one : {&q, &k, &v}) require(quantize::gpu::launch_int8(*one, nullptr).ok(), "quantise");

    Result made;
    made.lse.assign(static_cast<std::size_t>(p.tokens * p.query_heads), INFINITY);
    int8::ForwardParams forward;
    fill(forward);
    forward.query = operand(q);
    forward.key = operand(k);
    forward.value = operand(v);
    forward.key_mean_score = smooth ? score : nullptr;
    forward.items = schedule.forward.data();
    forward.item_count = &forward_items;
    forward.output = o;
    forward.lse = made.lse.data();
    forward.row_reference = m;
    forward.row_sum = l;
    require(int8::launch_forward(forward, nullptr) == cudaSuccess, "forward");
    for (std::size_t i = 0; i < in.q.size(); ++i) made.o.push_back(numerics::decode_bf16(o[i]));

    Int8Params d_out = quantiser(in.d_o, p.query_heads);
    d_out.rows16 = memory<std::uint16_t>(query_slots * static_cast<std::size_t>(d));
    d_out.output = {o, DType::bf16};
    d_out.row_reference = m;
    d_out.row_sum = l;
    d_out.row_d = memory<std::uint16_t>(8 * query_slots);
    d_out.row_lse = memory<float>(query_slots);
    require(quantize::gpu::launch_int8(d_out, nullptr).ok(), "quantise dO");
    made.d_q.assign(in.q.size(), 0.f);
    made.d_k.assign(in.k.size(), 0.f);
    made.d_v.assign(in.v.size(), 0.f);
    int8::BackwardParams backward;
    fill(backward);
    backward.query = operand(q);
    backward.key = operand(k);
    backward.gradient = operand(d_out);
    backward.value_rows16 = values;
    backward.gradient_rows16 = d_out.rows16;
    backward.row_lse = d_out.row_lse;
    backward.row_d = d_out.row_d;
    backward.items = schedule.backward.data();
    backward.item_count = &backward_items;
    backward.gradients = sm90::GradientFormat::f32;
    backward.d_query = made.d_q.data();
    backward.d_key = made.d_k.data();
    backward.d_value = made.d_v.data();
    require(int8::launch_backward(backward, nullptr) == cudaSuccess, "backward");
    require(counters[0] == 0 && counters[1] == 0, "leaving the counters at zero");
    return made;
  }
};

bool compare(int number, const Shape& shape, float factor, bool control) {
  Input in = normal_input(shape, static_cast<std::uint32_t>(7 + number));
  for (float& x : in.q) x *= factor;
  const bool window = shape.mask.left >= 0 || shape.mask.right >= 0;
  const Result cpu = run(in, recipe(window || control ? "sagebwd smooth-k=off" : "sagebwd"));
  const Result emulated = Call{in, in.problem, !window}.run();
  const double errors[] = {relative_l2(emulated.o, cpu.o), relative_l2(emulated.d_q, cpu.d_q), relative_l2(emulated.d_k, cpu.d_k),
                           relative_l2(emulated.d_v, cpu.d_v)};
  std::printf("case %d: O %.2e dQ %.2e dK %.2e dV %.2e\n", number, errors[0], errors[1], errors[2], errors[3]);
  std::fflush(stdout);
  return std::all_of(std::begin(errors), std::end(errors), [](double error) { return error < kParity; });
}

}  // namespace
}  // namespace flamia::test

int main(int argc, char** argv) {
  const flamia::test::Shape shapes[] = {
      {{128}, 1, 1, 128, {true, -1, -1}, 0},
      {{300}, 2, 2, 128, {true, -1, -1}, 0},
      {{1, 0, 129, 64, 257}, 4, 2, 128, {true, -1, -1}, 5},
      {{200, 131}, 2, 1, 128, {false, -1, -1}, 0},
      {{333, 40}, 2, 2, 128, {true, 70, 0}, 3},
      {{333, 40}, 2, 2, 128, {false, 50, 90}, 0},
      {{300, 17, 0, 1}, 2, 1, 64, {true, -1, -1}, 1},
      {{211, 90}, 3, 1, 64, {false, -1, 30}, 0},
  };
  const std::string which = argc > 1 ? argv[1] : "all";
  const float factor = argc > 2 ? std::strtof(argv[2], nullptr) : 1.f;
  const bool control = which == "control";
  bool good = true;
  for (int i = 0; i < static_cast<int>(std::size(shapes)); ++i)
    if (which == "all" || which == std::to_string(i) || (control && i == 0))
      good = flamia::test::compare(i, shapes[i], factor, control) && good;
  return good ? 0 : 1;
}
