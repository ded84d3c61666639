// SPDX-License-Identifier: Apache-2.0
#include "recipe/text_fields.hpp"

#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "numerics/exponent.hpp"
#include "recipe/names.hpp"

namespace flamia::recipe {
namespace {

template <class Number>
bool read_number(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc{} && end == text.data() + text.size();
}

std::string print_number(float x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};  // shortest text that reads back to x
}

/// At `separator`; false if there is none.
bool split(std::string_view text, char separator, std::string_view* left, std::string_view* right) {
  const std::size_t at = text.find(separator);
  if (at == std::string_view::npos) return false;
  *left = text.substr(0, at);
  *right = text.substr(at + 1);
  return true;
}

std::string extent_text(int n) { return n == 0 ? "all" : std::to_string(n); }
bool read_extent(std::string_view text, int* n) {
  if (text == "all") return *n = 0, true;
  return read_number(text, n) && *n != 0;
}

bool read_headroom(std::string_view text, int* n) { return read_number(text, n) && std::in_range<std::int8_t>(*n); }

std::string size_text(const Group& group) { return extent_text(group.rows) + "x" + extent_text(group.columns); }
bool read_size(std::string_view text, Group* group) {
  std::string_view rows, columns;
  return split(text, 'x', &rows, &columns) && read_extent(rows, &group->rows) && read_extent(columns, &group->columns);
}

bool read_group(std::string_view text, Group* group) {
  Group made{Group::Kind::blocks};
  if (read_size(text, &made)) return *group = made, true;
  std::string_view kind = text, size;
  if (split(text, '@', &kind, &size) && !read_size(size, &made)) return false;
  if (!read_word(kind, &made.kind) || made.kind == Group::Kind::blocks) return false;
  return *group = made, true;
}

/// "sticky", "sticky+2"; "+2" of a form that is not sticky, which the rules refuse.
std::string sticky_text(const Quantisation& form) {
  if (!form.sticky && form.headroom == 0) return "";
  return std::string(form.sticky ? "/sticky" : "/") + (form.headroom != 0 ? "+" + std::to_string(form.headroom) : "");
}
bool read_sticky(std::string_view part, Quantisation* form) {
  constexpr std::string_view kSticky = "sticky";
  const bool sticky = part.starts_with(kSticky);
  if (sticky) part.remove_prefix(kSticky.size());
  int headroom = 0;
  if (part.empty() ? !sticky : part[0] != '+' || !read_headroom(part.substr(1), &headroom)) return false;
  form->sticky = sticky;
  form->headroom = static_cast<std::int8_t>(headroom);
  return true;
}

bool read_form(std::string_view text, Quantisation* form) {
  std::vector<std::string_view> parts;
  for (std::string_view part, rest = text; !rest.empty(); parts.push_back(part))
    if (!split(rest, '/', &part, &rest)) part = rest, rest = {};
  Quantisation made;
  if (parts.empty() || !read_word(parts[0], &made.element)) return false;
  if (parts.size() > 1 && (parts.size() < 4 || !read_group(parts[1], &made.group) || !read_word(parts[2], &made.scale) ||
                           !read_word(parts[3], &made.rule)))
    return false;
  std::size_t i = 4;
  if (i < parts.size() && read_sticky(parts[i], &made)) ++i;
  if (i < parts.size() && parts[i].starts_with('x') && read_number(parts[i].substr(1), &made.tensor_scale) &&
      std::isfinite(made.tensor_scale))  // JSON has no infinity
    ++i;
  if (i < parts.size()) return false;
  return *form = made, true;
}

// ---- generic fields ----

template <auto Operand, auto Use>
constexpr TextField form_field(const char* key) {
  return {key,
          "a form such as e4m3/32xall/ue8m0/ceil: element (e4m3, e5m2, e2m1, int8), group (tensor, head, constant or rows x "
          "columns), scale (ue8m0, e4m3, f32, none), rule (ceil, floor, amax, amax_or_smaller, two_level, none), with /sticky, "
          "/sticky+2 (headroom, 0 to 4) or /x0.5 (tensor scale) behind it; or bf16",
          [](const Recipe& r) { return form_text(r.*Operand.*Use); },
          [](std::string_view text, Recipe* r) { return read_form(text, &(r->*Operand.*Use)); }};
}

/// A member of the recipe (Inner = nullptr) or of one of its parts.
template <auto Outer, auto Inner, class R>
auto& member(R& r) {
  if constexpr (std::is_null_pointer_v<decltype(Inner)>)
    return r.*Outer;
  else
    return r.*Outer.*Inner;
}

template <auto Outer, auto Inner = nullptr>
constexpr TextField on_off(const char* key) {
  return {key, "on or off", [](const Recipe& r) { return std::string(member<Outer, Inner>(r) ? "on" : "off"); },
          [](std::string_view text, Recipe* r) { return member<Outer, Inner>(*r) = text == "on", text == "on" || text == "off"; }};
}

template <auto Outer, auto Inner = nullptr>
constexpr TextField word(const char* key, const char* values) {
  return {key, values, [](const Recipe& r) { return word_of(member<Outer, Inner>(r)); },
          [](std::string_view text, Recipe* r) { return read_word(text, &member<Outer, Inner>(*r)); }};
}

using R = Recipe;
using O = OperandPolicy;

constexpr TextField kFields[] = {
    form_field<&R::q, &O::first>("q1"),
    form_field<&R::q, &O::second>("q2"),
    form_field<&R::k, &O::first>("k1"),
    form_field<&R::k, &O::second>("k2"),
    form_field<&R::v, &O::first>("v1"),
    form_field<&R::v, &O::second>("v2"),
    form_field<&R::d_out, &O::first>("do1"),
    form_field<&R::d_out, &O::second>("do2"),
    form_field<&R::p, &O::first>("p1"),
    form_field<&R::p, &O::second>("p2"),
    form_field<&R::d_s, &O::first>("ds1"),
    form_field<&R::d_s, &O::second>("ds2"),
    {"payloads", "1 or 2 (of dS)", [](const R& r) { return std::string(r.one_ds_payload ? "1" : "2"); },
     [](std::string_view text, R* r) { return r->one_ds_payload = text == "1", text == "1" || text == "2"; }},
    on_off<&R::rotate>("rotate"),
    on_off<&R::trains>("trains"),
    word<&R::gradient_p>("p-in-ds", "unrounded or codes"),
    word<&R::gradient_d>("d", "output (the row sum of dO and O) or scores (of P and dP, as dS takes them)"),
    on_off<&R::d_out_times_v_bf16>("dov-bf16"),
    word<&R::softmax, &SoftmaxPolicy::reference>("ref", "phase32 or tilesum"),
    word<&R::softmax, &SoftmaxPolicy::exp2>(
        "exp2", "hardware, poly3:2/16 (degree 2, 3 or 4, share of the keys), mitchell, schraudolph or direct"),
    {"poly", "degree:sixteenths, such as 3:2 (the polynomial of exp2 and its share of the keys)",
     [](const R& r) { return std::to_string(r.softmax.polynomial_degree) + ":" + std::to_string(r.softmax.polynomial_sixteenths); },
     [](std::string_view text, R* r) {
       std::string_view degree, share;
       return split(text, ':', &degree, &share) && read_number(degree, &r->softmax.polynomial_degree) &&
              read_number(share, &r->softmax.polynomial_sixteenths);
     }},
    word<&R::softmax, &SoftmaxPolicy::sum>("l", "codes or unrounded"),
    word<&R::accumulation, &AccumulationPolicy::model>("acc", "native or hopper13"),
    {"promote", "keys:queries, such as 128:64 (0: never)",
     [](const R& r) { return std::to_string(r.accumulation.promote_keys) + ":" + std::to_string(r.accumulation.promote_queries); },
     [](std::string_view text, R* r) {
       std::string_view keys, queries;
       return split(text, ':', &keys, &queries) && read_number(keys, &r->accumulation.promote_keys) &&
              read_number(queries, &r->accumulation.promote_queries);
     }},
    {"dq", "f16 or f32", [](const R& r) { return std::string(r.accumulation.dq_f16 ? "f16" : "f32"); },
     [](std::string_view text, R* r) { return r->accumulation.dq_f16 = text == "f16", text == "f16" || text == "f32"; }},
    word<&R::accumulation, &AccumulationPolicy::dq_prescale>("prescale", "causal_row or sequence"),
    on_off<&R::safety, &SafetyPolicy::fold_v_diagonal>("fold-v"),
    on_off<&R::safety, &SafetyPolicy::fold_k>("fold-k"),
    on_off<&R::smoothing, &SmoothingPolicy::q>("smooth-q"),
    on_off<&R::smoothing, &SmoothingPolicy::k>("smooth-k"),
    {"tile", "queries x keys, such as 64x128 (the mean of Q, the first level of P)",
     [](const R& r) { return std::to_string(r.tile.queries) + "x" + std::to_string(r.tile.keys); },
     [](std::string_view text, R* r) {
       std::string_view queries, keys;
       return split(text, 'x', &queries, &keys) && read_number(queries, &r->tile.queries) && read_number(keys, &r->tile.keys);
     }},
};

// ---- shorthands ----

/// Calls visit(form) for both forms of the given operands.
template <class MaybeConstRecipe, class Visit>
void each_form(MaybeConstRecipe& r, bool with_ds, Visit visit) {
  for (auto* policy : {&r.q, &r.k, &r.v, &r.d_out}) visit(policy->first), visit(policy->second);
  if (with_ds) visit(r.d_s.first), visit(r.d_s.second);
}

/// The text that all who have one agree on; "" if they do not.
class Agreed {
 public:
  void add(const std::string& own) {
    if (own.empty()) return;
    agree_ = agree_ && (common_.empty() || common_ == own);
    common_ = own;
  }
  std::string text() const { return agree_ ? common_ : ""; }

 private:
  std::string common_;
  bool agree_ = true;
};

/// What the forms agree on for which `text` is not empty.
template <class Text>
std::string common_text(const Recipe& r, bool with_ds, Text text) {
  Agreed common;
  each_form(r, with_ds, [&](const Quantisation& form) { common.add(text(form)); });
  return common.text();
}

bool is_power_rule(const Quantisation& f) { return f.rule == ScaleRule::ceil || f.rule == ScaleRule::floor; }
bool is_token_group(const Quantisation& f) {
  return f.group.kind == Group::Kind::blocks && f.group.columns == 0 && f.group.rows > 0;
}
bool is_nvfp4(const Quantisation& f) { return f.element == Element::e2m1 && f.scale == ScaleType::e4m3; }
/// Calls visit(form) for the forms of K and V that `sticky` and `headroom` speak of.
template <class MaybeConstRecipe, class Visit>
void each_that_can_stick(MaybeConstRecipe& r, Visit visit) {
  for (auto* policy : {&r.k, &r.v})
    for (auto* form : {&policy->first, &policy->second})
      if (form->group.kind == Group::Kind::blocks && form->scale == ScaleType::ue8m0) visit(*form);
}

/// dS in two payloads of E4M3: for dQ one exponent per query and 128 keys, for dK one per key and 64 queries.
constexpr Quantisation ds_payload(int rows, int columns) {
  return {Element::e4m3, {Group::Kind::blocks, rows, columns}, ScaleType::ue8m0, ScaleRule::ceil};
}
constexpr OperandPolicy kTwoDsPayloads{ds_payload(1, 128), ds_payload(64, 1)};

/// Blocks need an element with a scale: dS in BF16 becomes E4M3 first.
void scale_ds(R* r) {
  if (r->d_s.first.element != Element::bf16 && r->d_s.second.element != Element::bf16) return;
  r->d_s = kTwoDsPayloads;
  r->one_ds_payload = false;
}

std::string print_ds(const R& r) {
  const bool bf16 = r.d_s == OperandPolicy{};
  if (r.one_ds_payload ? bf16 : r.d_s == kTwoDsPayloads) return bf16 ? "bf16" : "e4m3";
  const Group &a = r.d_s.first.group, &b = r.d_s.second.group;
  if (a.kind != Group::Kind::blocks || b.kind != Group::Kind::blocks) return "";
  if (r.one_ds_payload) return r.d_s.first == r.d_s.second ? size_text(a) : "";
  return a.rows == 1 && b.columns == 1 && a.columns == b.rows && a.columns > 0 ? "row" + std::to_string(a.columns) : "";
}
bool read_ds(std::string_view text, R* r) {
  if (text == "bf16") return r->d_s = {}, r->one_ds_payload = true;
  if (text == "e4m3") return r->d_s = kTwoDsPayloads, r->one_ds_payload = false, true;
  Group group{Group::Kind::blocks};
  if (text.starts_with("row")) {
    int n = 0;
    if (!read_number(text.substr(3), &n) || n <= 0) return false;
    scale_ds(r);
    r->d_s.first.group = {Group::Kind::blocks, 1, n};
    r->d_s.second.group = {Group::Kind::blocks, n, 1};
    return r->one_ds_payload = false, true;
  }
  if (!read_size(text, &group)) return false;
  scale_ds(r);
  r->d_s.first.group = group;
  r->d_s.second = r->d_s.first;
  return r->one_ds_payload = true;
}

std::string print_dk(const R& r) {
  const Group& group = r.d_s.second.group;
  if (group.kind != Group::Kind::blocks || r.one_ds_payload) return "";
  return group.columns == 1 && group.rows > 0 ? "key" + std::to_string(group.rows) : size_text(group);
}
bool read_dk(std::string_view text, R* r) {
  Group group{Group::Kind::blocks, 0, 1};
  if (text.starts_with("key")) {
    if (!read_number(text.substr(3), &group.rows) || group.rows <= 0) return false;
  } else if (!read_size(text, &group)) {
    return false;
  }
  scale_ds(r);
  r->d_s.second.group = group;
  r->one_ds_payload = false;
  return true;
}

std::string print_polynomial(const R& r) {
  if (r.softmax.exp2 != Exp2::polynomial) return "";
  return "poly" + std::to_string(r.softmax.polynomial_degree) + ":" + std::to_string(r.softmax.polynomial_sixteenths) + "/16";
}
bool read_polynomial(std::string_view text, R* r) {
  std::string_view degree, share;
  if (!text.starts_with("poly") || !text.ends_with("/16") || !split(text.substr(4, text.size() - 7), ':', &degree, &share))
    return false;
  r->softmax.exp2 = Exp2::polynomial;
  return read_number(degree, &r->softmax.polynomial_degree) && read_number(share, &r->softmax.polynomial_sixteenths);
}

constexpr TextField kShorthands[] = {
    {"ds",
     "bf16 (rounded once for dQ and dK, no scale), e4m3 (two payloads: 1x128 for dQ, 64x1 for dK), RxC (one payload, such as "
     "32x32) "
     "or rowN (row x N keys and key x N queries, such as row32)",
     print_ds, read_ds},
    {"dk", "keyN (one exponent per key and N queries, such as key64) or RxC (queries x keys, such as 64x32)", print_dk, read_dk},
    {"block", "tokens that share a scale of Q, K, V and dO, such as 32",
     [](const R& r) {
       return common_text(r, false, [](const Quantisation& f) { return is_token_group(f) ? std::to_string(f.group.rows) : ""; });
     },
     [](std::string_view text, R* r) {
       int n = 0;
       if (!read_number(text, &n) || n <= 0) return false;
       each_form(*r, false, [n](Quantisation& f) { f.group.rows = is_token_group(f) ? n : f.group.rows; });
       return true;
     }},
    {"sticky", "on or off (power-of-two scales of K and V)",
     [](const R& r) {
       Agreed common;
       each_that_can_stick(r, [&](const Quantisation& f) { common.add(f.sticky ? "on" : "off"); });
       return common.text();
     },
     [](std::string_view text, R* r) {
       each_that_can_stick(*r, [text](Quantisation& f) {
         f.sticky = text == "on";
         if (!f.sticky) f.headroom = 0;
       });
       return text == "on" || text == "off";
     }},
    {"headroom", "0 to 4 (binades that sticky exponents begin above the first token's)",
     [](const R& r) {
       Agreed common;
       each_that_can_stick(r, [&](const Quantisation& f) { common.add(std::to_string(f.headroom)); });
       return common.text();
     },
     [](std::string_view text, R* r) {
       int headroom = 0;
       if (!read_headroom(text, &headroom)) return false;
       bool taken = false;  // then the rules judge it
       each_that_can_stick(*r, [&](Quantisation& f) { f.headroom = static_cast<std::int8_t>(headroom), taken = true; });
       return taken || (headroom >= 0 && headroom <= numerics::kMostHeadroom);
     }},
    {"rule", "ceil or floor (every power-of-two scale)",
     [](const R& r) { return common_text(r, true, [](const Quantisation& f) { return is_power_rule(f) ? word_of(f.rule) : ""; }); },
     [](std::string_view text, R* r) {
       ScaleRule rule{};
       if (!read_word(text, &rule) || (rule != ScaleRule::ceil && rule != ScaleRule::floor)) return false;
       each_form(*r, true, [rule](Quantisation& f) { f.rule = is_power_rule(f) ? rule : f.rule; });
       return true;
     }},
    {"nvfp4", "amax or amax_or_smaller (the scales of NVFP4 operands)",
     [](const R& r) { return common_text(r, false, [](const Quantisation& f) { return is_nvfp4(f) ? word_of(f.rule) : ""; }); },
     [](std::string_view text, R* r) {
       ScaleRule rule{};
       if (!read_word(text, &rule) || (rule != ScaleRule::amax && rule != ScaleRule::amax_or_smaller)) return false;
       each_form(*r, false, [rule](Quantisation& f) { f.rule = is_nvfp4(f) ? rule : f.rule; });
       return true;
     }},
    {"exp2", "poly3:2/16 (degree, share of the keys)", print_polynomial, read_polynomial},
};

}  // namespace

std::string group_text(const Group& group) {
  if (group.kind == Group::Kind::blocks) return size_text(group);
  std::string text = word_of(group.kind);
  if (group.rows != 0 || group.columns != 0) text.append("@").append(size_text(group));
  return text;
}

std::string form_text(const Quantisation& form) {
  Quantisation plain;
  plain.element = form.element;
  if (form == plain) return word_of(form.element);
  std::string text = word_of(form.element) + "/" + group_text(form.group) + "/" + word_of(form.scale) + "/" + word_of(form.rule);
  text += sticky_text(form);
  if (form.tensor_scale != plain.tensor_scale) text.append("/x").append(print_number(form.tensor_scale));
  return text;
}

std::span<const TextField> text_fields() { return kFields; }
std::span<const TextField> text_shorthands() { return kShorthands; }

}  // namespace flamia::recipe
