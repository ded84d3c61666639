// SPDX-License-Identifier: Apache-2.0
// The host quantiser, bit for bit against a slow one, for every form, over documents of awkward lengths.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "quantize/encode.hpp"
#include "reference.hpp"

namespace flamia::quantize {
namespace {

using namespace testing_reference;
using Kind = Group::Kind;

constexpr std::uint16_t kBf16Nan = 0x7fc0, kBf16Inf = 0x7f80, kBf16MinusInf = 0xff80;

schedule::Documents documents_of(std::vector<std::int32_t> cu_seqlens, std::int64_t tokens) {
  schedule::Documents made;
  const Status status = schedule::Documents::create(cu_seqlens, tokens, &made);
  EXPECT_TRUE(status.ok()) << status.message();
  return made;
}

Quantisation form_of(Element element, Group group, ScaleType scale, ScaleRule rule, bool sticky = false, float tensor_scale = 1.f) {
  return {element, group, scale, rule, sticky, 0, tensor_scale};
}
Group blocks(int rows, int columns) { return {Kind::blocks, rows, columns}; }

/// Every form that the rules allow, groups of 1, 7, 32, 50 (more rows than a thread holds) and all rows among them.
std::vector<Quantisation> all_forms() {
  std::vector<Quantisation> forms{Quantisation{}};
  std::vector<Group> groups{{Kind::tensor}, {Kind::head}};
  for (const int rows : {0, 1, 7, 32, 50})
    for (const int columns : {0, 1, 16}) groups.push_back(blocks(rows, columns));
  for (const Group& group : groups)
    for (const bool sticky : {false, true}) {
      if (sticky && group.kind != Kind::blocks) continue;
      for (const Element element : {Element::e4m3, Element::e5m2, Element::e2m1})
        for (const ScaleRule rule : {ScaleRule::ceil, ScaleRule::floor})
          if (!sticky || rule == ScaleRule::ceil) forms.push_back(form_of(element, group, ScaleType::ue8m0, rule, sticky));
      for (const Element element : {Element::e4m3, Element::e5m2, Element::e2m1, Element::int8})
        forms.push_back(form_of(element, group, ScaleType::f32, ScaleRule::amax, sticky));
      forms.push_back(form_of(Element::e2m1, group, ScaleType::e4m3, ScaleRule::amax, sticky, 0.5f));
    }
  for (const int rows : {1, 32})
    for (const int columns : {0, 16})
      for (const std::int8_t headroom : {std::int8_t{1}, std::int8_t{4}}) {
        forms.push_back(form_of(Element::e4m3, blocks(rows, columns), ScaleType::ue8m0, ScaleRule::ceil, true));
        forms.back().headroom = headroom;
      }
  for (const int columns : {0, 16})
    for (const float tensor_scale : {1.f, 0.0625f})
      forms.push_back(form_of(Element::e2m1, blocks(1, columns), ScaleType::e4m3, ScaleRule::amax_or_smaller, false, tensor_scale));
  return forms;
}

std::string text_of(const Quantisation& f) {
  return "element " + std::to_string(static_cast<int>(f.element)) + " group kind " +
         std::to_string(static_cast<int>(f.group.kind)) + " " + std::to_string(f.group.rows) + "x" +
         std::to_string(f.group.columns) + " scale " + std::to_string(static_cast<int>(f.scale)) + " rule " +
         std::to_string(static_cast<int>(f.rule)) + (f.sticky ? " sticky" : "") + " headroom " + std::to_string(f.headroom);
}

void expect_equal(const QuantisedTensor& got, const Expected& expected, const std::string& what) {
  ASSERT_EQ(unpacked(got), expected.codes) << what;
  ASSERT_EQ(stored_scales(got), expected.scales) << what;
}

void check_all_forms(const Input& in, const schedule::Documents& documents, bool rotate, bool divide) {
  for (const Quantisation& form : all_forms()) {
    QuantisedTensor got;
    const Status status = quantise(in.view(rotate, divide), documents, form, 2, &got);
    ASSERT_TRUE(status.ok()) << status.message();
    expect_equal(got, quantise_slowly(in, documents, form, rotate, divide), text_of(form));
  }
}

const std::vector<std::int32_t> kAwkward{0, 1, 1, 34, 34, 97, 98, 110};  // lengths 1, 0, 33, 0, 63, 1, 12; tokens may follow

TEST(Quantise, EveryFormIsTheSlowOneBitForBit) { check_all_forms(Input(117, 2, 64), documents_of(kAwkward, 117), false, false); }
TEST(Quantise, Rotated) { check_all_forms(Input(117, 1, 128, 2), documents_of(kAwkward, 117), true, false); }
TEST(Quantise, DividedByL) { check_all_forms(Input(110, 2, 64, 3), documents_of(kAwkward, 110), false, true); }
TEST(Quantise, OddHeadDims) {
  check_all_forms(Input(57, 1, 48, 4), documents_of({0, 5, 57}, 57), false, false);
  check_all_forms(Input(40, 2, 16, 5), documents_of({0, 40}, 40), false, false);
}

TEST(Quantise, WithFlaggedTokens) {
  Input in(110, 2, 64, 6);
  in.at(0, 1, 3) = kBf16Nan;
  in.at(40, 0, 63) = kBf16Inf;
  in.at(66, 0, 0) = kBf16MinusInf;
  in.at(109, 1, 17) = kBf16Nan;
  check_all_forms(in, documents_of(kAwkward, 110), false, false);
  check_all_forms(in, documents_of(kAwkward, 110), true, true);
}

TEST(Quantise, EveryInstructionSetAndThreadCountGivesTheSameBits) {
  const Input in(117, 3, 128, 7);
  const schedule::Documents documents = documents_of(kAwkward, 117);
  int count = 0;
  const RowKernels* versions = all_row_kernels(&count);
  for (const Quantisation& form : all_forms()) {
    const auto run = [&](const RowKernels& kernels, int threads) {
      std::pair<std::vector<std::uint8_t>, std::vector<std::uint8_t>> out;
      out.first.assign(static_cast<std::size_t>(codes_bytes(form, 117, 3, 128)), 0xee);
      out.second.assign(static_cast<std::size_t>(scale_bytes(form, documents, 3, 128)), 0xee);
      const Status status = quantise_into(in.view(true, true), documents, form, threads, out.first, out.second, kernels);
      EXPECT_TRUE(status.ok()) << status.message();
      return out;
    };
    const auto first = run(versions[0], 1);
    for (int i = 0; i < count; ++i)
      for (const int threads : {1, 2, 3})
        ASSERT_EQ(run(versions[i], threads), first) << versions[i].name << ", " << threads << " threads, " << text_of(form);
  }
}

TEST(Quantise, OtherDtypesAndStrides) {
  const std::int64_t tokens = 70;
  const int heads = 2, dim = 64;
  const Input in(tokens, heads, dim, 8);
  const schedule::Documents documents = documents_of({0, 33, 70}, tokens);
  const Quantisation form = form_of(Element::e4m3, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil);
  QuantisedTensor expected;
  ASSERT_TRUE(quantise(in.view(), documents, form, 1, &expected).ok());

  // FP32 in a [heads][tokens][dim + 3] buffer
  std::vector<float> wide(static_cast<std::size_t>(heads * tokens * (dim + 3)), 1e30f);
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < dim; ++c)
        wide[static_cast<std::size_t>((h * tokens + t) * (dim + 3) + c)] =
            numerics::decode_bf16(in.bf16[static_cast<std::size_t>((t * heads + h) * dim + c)]);
  QuantisedTensor got;
  ASSERT_TRUE(
      quantise({{wide.data(), DType::f32, dim + 3, tokens * (dim + 3)}, heads, dim, false, nullptr}, documents, form, 1, &got)
          .ok());
  EXPECT_EQ(got.codes, expected.codes);
  EXPECT_EQ(got.scales, expected.scales);

  // FP16 values are exact in FP32
  std::mt19937 bits(9);
  std::vector<std::uint16_t> half(static_cast<std::size_t>(tokens * heads * dim));
  std::vector<float> same;
  for (std::uint16_t& h : half)
    h = static_cast<std::uint16_t>(bits() % 0x7c00u | (bits() & 0x8000u)), same.push_back(numerics::decode_f16(h));
  QuantisedTensor from_half, from_float;
  ASSERT_TRUE(quantise({{half.data(), DType::f16, 0, 0}, heads, dim, false, nullptr}, documents, form, 1, &from_half).ok());
  ASSERT_TRUE(quantise({{same.data(), DType::f32, 0, 0}, heads, dim, false, nullptr}, documents, form, 1, &from_float).ok());
  EXPECT_EQ(from_half.codes, from_float.codes);
  EXPECT_EQ(from_half.scales, from_float.scales);
}

// ---- properties that do not need the slow quantiser ----

TEST(Quantise, DocumentsDoNotSeeEachOtherButTensorScalesDo) {
  Input in(110, 2, 64, 10);
  const schedule::Documents documents = documents_of(kAwkward, 110);
  int shared_and_changed = 0;
  Input louder = in;  // the document of tokens 34 ... 96 times 2^13
  for (std::int64_t t = 34; t < 97; ++t)
    for (int h = 0; h < 2; ++h)
      for (int c = 0; c < 64; ++c) louder.at(t, h, c) = numerics::encode_bf16(numerics::decode_bf16(in.at(t, h, c)) * 8192.f);
  for (const Quantisation& form : all_forms()) {
    QuantisedTensor a, b;
    ASSERT_TRUE(quantise(in.view(), documents, form, 1, &a).ok());
    ASSERT_TRUE(quantise(louder.view(), documents, form, 1, &b).ok());
    const std::vector<float> x = dequantise(a, documents), y = dequantise(b, documents);
    bool same = true;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::int64_t token = static_cast<std::int64_t>(i) / (2 * 64);
      if (token < 34 || token >= 97) same = same && numerics::bits_of(x[i]) == numerics::bits_of(y[i]);
    }
    const bool shared = form.group.kind == Kind::tensor || form.group.kind == Kind::head;
    EXPECT_TRUE(same || shared) << text_of(form);
    shared_and_changed += shared && !same;
  }
  EXPECT_GE(shared_and_changed, 16);  // control: scales of a tensor or head do carry over (two of them may be saturated in both)
}

TEST(Quantise, StickyScalesSeeNoLaterToken) {
  const Input in(200, 1, 64, 11);
  Input changed = in;
  for (std::int64_t t = 100; t < 200; ++t)
    for (int c = 0; c < 64; ++c) changed.at(t, 0, c) = numerics::encode_bf16(1e6f);
  const schedule::Documents one = schedule::Documents::single(200);
  for (const int headroom : {-1, 0, 2}) {
    const bool sticky = headroom >= 0;
    Quantisation form = form_of(Element::e4m3, blocks(1, 0), ScaleType::ue8m0, ScaleRule::ceil, sticky);
    form.headroom = static_cast<std::int8_t>(std::max(headroom, 0));
    QuantisedTensor a, b;
    ASSERT_TRUE(quantise(in.view(), one, form, 2, &a).ok());
    ASSERT_TRUE(quantise(changed.view(), one, form, 2, &b).ok());
    EXPECT_TRUE(std::equal(a.scales.begin(), a.scales.begin() + 100, b.scales.begin()));
    EXPECT_TRUE(std::equal(a.codes.begin(), a.codes.begin() + 100 * 64, b.codes.begin()));
    EXPECT_EQ(std::is_sorted(a.scales.begin(), a.scales.end()), sticky);
  }
}

/// A document's first exponent is raised, all others follow it: the maximum of what they would be without, and of the first one and the headroom.
TEST(Quantise, HeadroomRaisesTheFirstExponentOfADocument) {
  const std::int64_t length = 90;
  const schedule::Documents two = documents_of({0, 90, 180}, 180);
  const auto quantised = [&](const Input& in, int headroom, int threads) {
    Quantisation form = form_of(Element::e4m3, blocks(1, 0), ScaleType::ue8m0, ScaleRule::ceil, true);
    form.headroom = static_cast<std::int8_t>(headroom);
    QuantisedTensor made;
    EXPECT_TRUE(quantise(in.view(), two, form, threads, &made).ok());
    return made;
  };
  Input in(180, 2, 64, 21);
  for (std::int64_t t = 0; t < 180; ++t)  // magnitudes that rise and fall
    for (int h = 0; h < 2; ++h)
      for (int c = 0; c < 64; ++c)
        in.at(t, h, c) = numerics::encode_bf16(std::ldexp(numerics::decode_bf16(in.at(t, h, c)), static_cast<int>(t % 50) / 10));
  const QuantisedTensor plain = quantised(in, 0, 1);
  for (const int headroom : {1, 2, 4})
    for (const int threads : {1, 3}) {  // heads by threads, and blocks by threads
      const QuantisedTensor raised = quantised(in, headroom, threads);
      int above = 0;
      for (std::size_t i = 0; i < plain.scales.size(); ++i) {
        const std::size_t first = i / (2 * length) * (2 * length) + i % 2;
        const int expected = std::max<int>(plain.scales[i], plain.scales[first] + headroom);
        ASSERT_EQ(int{raised.scales[i]}, expected) << i;
        above += expected > plain.scales[i];
      }
      EXPECT_GT(above, 20);
      EXPECT_LT(above, 340);
    }
  // a first token that holds nothing, or NaN, raises nobody
  for (const float value : {0.f, numerics::quiet_nan()}) {
    Input other = in;
    for (int h = 0; h < 2; ++h)
      for (int c = 0; c < 64; ++c) other.at(0, h, c) = numerics::encode_bf16(value);
    const QuantisedTensor without = quantised(other, 0, 1), with = quantised(other, 2, 1);
    EXPECT_TRUE(std::equal(without.scales.begin(), without.scales.begin() + 2 * length, with.scales.begin()));
    EXPECT_TRUE(std::equal(without.codes.begin(), without.codes.begin() + 2 * length * 64, with.codes.begin()));
    EXPECT_NE(without.scales, with.scales);  // control: the second document has its own first token
  }
}

TEST(Quantise, CeilNeverSaturatesAndRoundsWithinHalfAStepFloorDoes) {
  const Input in(128, 2, 64, 12);
  const schedule::Documents one = schedule::Documents::single(128);
  const std::vector<float> x = values_of(in, false, false);
  for (const ScaleRule rule : {ScaleRule::ceil, ScaleRule::floor}) {
    QuantisedTensor q;
    ASSERT_TRUE(quantise(in.view(), one, form_of(Element::e4m3, blocks(1, 0), ScaleType::ue8m0, rule), 1, &q).ok());
    const std::vector<float> y = dequantise(q, one);
    int beyond = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double least = std::ldexp(1.0, q.scales[i / 64] - 127 - 9);
      beyond += std::fabs(static_cast<double>(y[i]) - x[i]) > std::max(std::fabs(x[i]) / 16.0, least / 2);
    }
    if (rule == ScaleRule::ceil) {
      EXPECT_EQ(beyond, 0);
    } else {
      EXPECT_GT(beyond, 0);  // control: the floor rule saturates
    }
  }
}

TEST(Quantise, TheSmallerOfTwoScalesHasTheSmallerError) {
  const Input in(64, 2, 64, 13);
  const schedule::Documents one = schedule::Documents::single(64);
  const std::vector<float> x = values_of(in, false, false);
  const auto squared_error = [&](ScaleRule rule) {
    QuantisedTensor q;
    EXPECT_TRUE(quantise(in.view(), one, form_of(Element::e2m1, blocks(1, 16), ScaleType::e4m3, rule), 1, &q).ok());
    const std::vector<float> y = dequantise(q, one);
    std::vector<double> groups(x.size() / 16);
    for (std::size_t i = 0; i < x.size(); ++i)
      groups[i / 16] += (static_cast<double>(y[i]) - x[i]) * (static_cast<double>(y[i]) - x[i]);
    return groups;
  };
  const std::vector<double> amax = squared_error(ScaleRule::amax), smaller = squared_error(ScaleRule::amax_or_smaller);
  int better = 0;
  for (std::size_t g = 0; g < amax.size(); ++g) {
    EXPECT_LE(smaller[g], amax[g] * 1.004);  // errors are compared as sums of FP16
    better += smaller[g] < amax[g] * 0.99;
  }
  EXPECT_GT(better, static_cast<int>(amax.size()) / 10);
}

TEST(Quantise, FlaggedGroupsGiveNanAndZeroCodes) {
  Input in(96, 1, 64, 14);
  in.at(40, 0, 5) = kBf16Nan;
  const schedule::Documents one = schedule::Documents::single(96);
  QuantisedTensor q;
  ASSERT_TRUE(quantise(in.view(), one, form_of(Element::e4m3, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil, true), 1, &q).ok());
  EXPECT_EQ(q.scales[1], 255);
  EXPECT_NE(q.scales[2], 255);  // the maximum carries on without it
  EXPECT_GE(q.scales[2], q.scales[0]);
  const std::vector<float> y = dequantise(q, one);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i / 64 >= 32 && i / 64 < 64);
}

TEST(Quantise, RowsThatSeeNoKeyBecomeZeroRowsWhateverTheyHold) {
  Input in(4, 1, 64, 15);
  in.l = {0.f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 2.f};
  in.at(0, 0, 0) = kBf16Nan;
  QuantisedTensor q;
  const schedule::Documents one = schedule::Documents::single(4);
  ASSERT_TRUE(
      quantise(in.view(false, true), one, form_of(Element::e4m3, blocks(1, 0), ScaleType::ue8m0, ScaleRule::ceil), 1, &q).ok());
  EXPECT_EQ(q.scales[0], 0);
  EXPECT_EQ(q.scales[1], 0);
  EXPECT_EQ(q.scales[2], 255);
  EXPECT_TRUE(std::all_of(q.codes.begin(), q.codes.begin() + 2 * 64, [](std::uint8_t c) { return c == 0; }));
  EXPECT_TRUE(std::any_of(q.codes.begin() + 3 * 64, q.codes.end(), [](std::uint8_t c) { return c != 0; }));
}

TEST(Quantise, Bf16SubnormalsAreInputLikeAnyOther) {
  Input in(1, 1, 16, 16);
  for (int c = 0; c < 16; ++c) in.at(0, 0, c) = static_cast<std::uint16_t>(c * 8);  // multiples of 2^-133 * 8
  QuantisedTensor q;
  const schedule::Documents one = schedule::Documents::single(1);
  ASSERT_TRUE(quantise(in.view(), one, form_of(Element::e4m3, blocks(1, 0), ScaleType::ue8m0, ScaleRule::ceil), 1, &q).ok());
  EXPECT_EQ(q.scales[0], 0);  // 2^-127
  for (int c = 0; c < 16; ++c)
    EXPECT_EQ(numerics::decode<numerics::kE4M3>(q.codes[static_cast<std::size_t>(c)]),
              std::ldexp(static_cast<float>(c), -130 + 127))
        << c;
}

// ---- layout ----

TEST(Layout, ShapesAndBounds) {
  const schedule::Documents documents = documents_of(kAwkward, 240);  // lengths 1, 0, 33, 0, 63, 1, 12
  const auto shape = [&](Group group) {
    return scale_shape(form_of(Element::e4m3, group, ScaleType::ue8m0, ScaleRule::ceil), documents, 3, 64);
  };
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(shape({Kind::tensor}), (Shape{1}));
  EXPECT_EQ(shape({Kind::head}), (Shape{3}));
  EXPECT_EQ(shape(blocks(32, 0)), (Shape{1 + 2 + 2 + 1 + 1, 3}));
  EXPECT_EQ(shape(blocks(1, 0)), (Shape{240, 3}));
  EXPECT_EQ(shape(blocks(1, 16)), (Shape{240, 3, 4}));
  EXPECT_EQ(shape(blocks(32, 1)), (Shape{7, 3, 64}));
  EXPECT_EQ(shape(blocks(0, 0)), (Shape{5, 3}));  // documents that are not empty
  for (const Quantisation& form : all_forms()) {
    const std::int64_t bytes = scale_bytes(form, documents, 3, 64), bound = scale_bytes_bound(form, 240, 7, 3, 64);
    EXPECT_LE(bytes, bound) << text_of(form);
  }
}

TEST(Layout, TheBoundHoldsForAnyLengthsAndIsReached) {
  std::mt19937 bits(17);
  const Quantisation form = form_of(Element::e4m3, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil);
  for (int i = 0; i < 3000; ++i) {
    const auto tokens = static_cast<std::int32_t>(bits() % 500);
    std::vector<std::int32_t> cu{0};
    const std::size_t count = 1 + bits() % 40;
    while (cu.size() <= count) cu.push_back(static_cast<std::int32_t>(bits() % static_cast<unsigned>(tokens + 1)));
    std::sort(cu.begin(), cu.end());
    EXPECT_LE(scale_bytes(form, documents_of(cu, tokens), 2, 64),
              scale_bytes_bound(form, tokens, static_cast<std::int64_t>(count), 2, 64));
  }
  EXPECT_EQ(scale_bytes(form, documents_of({0, 1, 2, 3}, 3), 2, 64), scale_bytes_bound(form, 3, 3, 2, 64));
}

TEST(Layout, NothingBeyondTheStatedBytesIsWrittenAndTooLittleIsRefused) {
  const Input in(117, 2, 64, 18);
  const schedule::Documents documents = documents_of(kAwkward, 117);
  for (const Quantisation& form : all_forms()) {
    const auto codes_size = static_cast<std::size_t>(codes_bytes(form, 117, 2, 64)),
               scales_size = static_cast<std::size_t>(scale_bytes(form, documents, 2, 64));
    std::vector<std::uint8_t> codes(codes_size + 64, 0xa5), scales(scales_size + 64, 0xa5);
    ASSERT_TRUE(quantise_into(in.view(), documents, form, 2, codes, scales).ok());
    const auto untouched = [](std::uint8_t b) { return b == 0xa5; };
    EXPECT_TRUE(std::all_of(codes.begin() + static_cast<std::ptrdiff_t>(codes_size), codes.end(), untouched)) << text_of(form);
    EXPECT_TRUE(std::all_of(scales.begin() + static_cast<std::ptrdiff_t>(scales_size), scales.end(), untouched)) << text_of(form);
    const Status status = quantise_into(in.view(), documents, form, 1, std::span(codes).first(codes_size - 1), scales);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find("codes holds"), std::string::npos);
  }
}

TEST(Errors, NameTheArgument) {
  const Input in(32, 1, 64);
  const schedule::Documents one = schedule::Documents::single(32);
  QuantisedTensor q;
  const auto message = [&](QuantiseInput input, Quantisation form, int threads = 1) {
    const Status status = quantise(input, one, form, threads, &q);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    return status.message();
  };
  const Quantisation good = form_of(Element::e4m3, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil);
  QuantiseInput input = in.view();
  input.dim = 48;
  input.rotate = true;
  EXPECT_NE(message(input, good).find("rotate: dim = 48"), std::string::npos);
  input = in.view();
  input.heads = 0;
  EXPECT_NE(message(input, good).find("heads = 0"), std::string::npos);
  input = in.view();
  input.tensor.data = nullptr;
  EXPECT_NE(message(input, good).find("data is null"), std::string::npos);
  EXPECT_NE(message(in.view(), good, -1).find("threads = -1"), std::string::npos);
  EXPECT_NE(
      message(in.view(), form_of(Element::e4m3, {Kind::constant}, ScaleType::none, ScaleRule::none)).find("constant is for P"),
      std::string::npos);
  EXPECT_NE(message(in.view(), form_of(Element::e4m3, blocks(32, 0), ScaleType::f32, ScaleRule::ceil)).find("powers of two"),
            std::string::npos);
  EXPECT_NE(message(in.view(), form_of(Element::int8, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil)).find("INT8"),
            std::string::npos);
  EXPECT_NE(message(in.view(), form_of(Element::e4m3, blocks(-2, 0), ScaleType::ue8m0, ScaleRule::ceil)).find("-2 x 0"),
            std::string::npos);
  EXPECT_NE(message(in.view(), form_of(Element::e4m3, blocks(1, 16), ScaleType::ue8m0, ScaleRule::two_level))
                .find("two_level is for E2M1"),
            std::string::npos);
  EXPECT_NE(message(in.view(), form_of(Element::e4m3, {Kind::tensor}, ScaleType::f32, ScaleRule::amax, true)).find("sticky"),
            std::string::npos);
  for (const auto& [sticky, scale, headroom] : {std::tuple{false, ScaleType::ue8m0, 1},
                                                {true, ScaleType::f32, 1},
                                                {true, ScaleType::ue8m0, 5},
                                                {true, ScaleType::ue8m0, -1}}) {
    Quantisation form =
        form_of(Element::e4m3, blocks(1, 0), scale, scale == ScaleType::f32 ? ScaleRule::amax : ScaleRule::ceil, sticky);
    form.headroom = static_cast<std::int8_t>(headroom);
    EXPECT_NE(message(in.view(), form).find("headroom = " + std::to_string(headroom)), std::string::npos);
  }
  QuantisedTensor kept;
  EXPECT_TRUE(kept.codes.empty());
}

TEST(Quantise, NoTokensAndEmptyDocuments) {
  QuantisedTensor q;
  const Quantisation form = form_of(Element::e4m3, blocks(32, 0), ScaleType::ue8m0, ScaleRule::ceil);
  ASSERT_TRUE(quantise({{nullptr, DType::bf16, 0, 0}, 2, 64, false, nullptr}, documents_of({0, 0, 0}, 0), form, 2, &q).ok());
  EXPECT_TRUE(q.codes.empty() && q.scales.empty());
  const Input in(5, 1, 64);
  ASSERT_TRUE(quantise(in.view(), documents_of({0, 0}, 5), form, 2, &q).ok());  // five tokens after the last document
  EXPECT_EQ(q.codes, std::vector<std::uint8_t>(5 * 64, 0));
  EXPECT_TRUE(q.scales.empty());
}

}  // namespace
}  // namespace flamia::quantize
