// Cases of the operator for tests and benchmarks: the definition of a case, its name, and its tensors.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/rule/problem.h"
#include "tests/support/tensor.h"

namespace efla::test {

// The erase keys of a case: none, κ = b ∘ k with b between 0 and 1 per channel, or directions of their own.
enum class EraseKey { none, gated, free };

struct DeltaCase {
  const char* step = "exact";
  double erase_scale = 1, write_scale = 1;
  bool qk_l2norm = false;
  std::int64_t batch = 1, tokens = 1, heads = 1, key_dim = 1, value_dim = 1;
  double key_norm = 1;  // ‖k‖ of a token is uniform between key_norm/2 and key_norm
  Layout layout = Layout::contiguous;
  bool initial_state = false, final_state = false, dfinal_state = false;
  double scale = NAN;  // factor on the output; NaN: the default
  Decay decay = Decay::none;
  double gate = 1;                            // g is uniform between −gate and 0
  std::int64_t group = 1;                     // value heads per query head
  std::vector<std::int64_t> cu_seqlens = {};  // packed sequences, if any; batch is then 1
  std::int64_t directions = 0;                // of all keys; 0: one per key
  double fade = 1;                            // factor of the values of the last kChunk tokens
  EraseKey erase_key = EraseKey::none;
  std::int64_t steps_per_token = 1;  // tokens and cu_seqlens count steps

  std::int64_t token_rows() const { return tokens / steps_per_token; }  // of q, g and o
  DeltaShape shape() const {
    const auto ends = static_cast<std::int64_t>(cu_seqlens.size());
    return {batch, tokens, heads, heads * group, key_dim, value_dim, ends == 0 ? 0 : ends - 1};
  }
  DeltaRule rule() const {
    DeltaRule rule{parse_step_size(step)};
    rule.step.erase_scale = erase_scale;
    rule.step.write_scale = write_scale;
    rule.qk_l2norm = qk_l2norm;
    rule.scale = scale;
    rule.decay = decay;
    rule.two_keys = erase_key != EraseKey::none;
    return rule;
  }
};

// Returns, for example, exact_erase2_B1_T33_H2_K64_V32_norm100_sliced_in_out_dout: letters, digits and _ only, as
// GoogleTest requires.
inline std::string name_of(const DeltaCase& c) {
  std::ostringstream name;
  name << c.step;
  if (c.erase_scale != 1) name << "_erase" << c.erase_scale;
  if (c.write_scale != 1) name << "_write" << c.write_scale;
  if (c.qk_l2norm) name << "_l2norm";
  name << "_B" << c.batch << "_T" << c.tokens << "_H" << c.heads << "_K" << c.key_dim << "_V" << c.value_dim;
  if (c.key_norm != 1) name << "_norm" << c.key_norm;
  name << '_' << name_of(c.layout);
  if (c.initial_state) name << "_in";
  if (c.final_state) name << "_out";
  if (c.dfinal_state) name << "_dout";
  if (!std::isnan(c.scale)) name << "_scale" << c.scale;
  if (c.decay != Decay::none) name << (c.decay == Decay::scalar ? "_scalar" : "_channel") << c.gate;
  if (c.group != 1) name << "_group" << c.group;
  if (!c.cu_seqlens.empty()) name << "_packed";
  for (std::size_t i = 1; i < c.cu_seqlens.size(); ++i) name << '_' << c.cu_seqlens[i];
  if (c.directions != 0) name << "_directions" << c.directions;
  if (c.fade != 1) name << "_fade" << c.fade;
  if (c.erase_key != EraseKey::none) name << (c.erase_key == EraseKey::gated ? "_gated" : "_free") << "_erase_key";
  if (c.steps_per_token != 1) name << "_steps" << c.steps_per_token;
  std::string text = name.str();
  for (char& letter : text) letter = letter == '.' ? 'p' : letter == '-' ? 'm' : letter == '+' ? 'e' : letter;
  return text;
}

// Prints a case for GoogleTest.
inline std::ostream& operator<<(std::ostream& out, const DeltaCase& c) { return out << name_of(c); }

// Returns values in row-major order from `draw`.
template <class Draw>
std::vector<double> drawn(std::int64_t count, Draw&& draw) {
  std::vector<double> values(count);
  for (double& x : values) x = draw();
  return values;
}

// Returns `rows` keys of `dim` components with lengths between norm/2 and norm. Their random directions repeat after
// `directions` keys, or never if that is 0.
inline std::vector<double> drawn_keys(std::int64_t rows, std::int64_t dim, double norm, std::int64_t directions,
                                      Random& random) {
  std::vector<double> values = drawn(rows * dim, [&] { return random.normal(); });
  for (std::int64_t i = directions * dim; directions > 0 && i < rows * dim; ++i)
    values[i] = values[i - directions * dim];
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) sum += values[r * dim + i] * values[r * dim + i];
    const double factor = norm * random.uniform(0.5, 1.0) / std::sqrt(sum);
    for (std::int64_t i = 0; i < dim; ++i) values[r * dim + i] *= factor;
  }
  return values;
}

// Returns the values of a case, with the values of the last kChunk tokens multiplied by `fade`.
template <class Draw>
std::vector<double> drawn_values(const DeltaCase& c, Draw&& draw) {
  const std::int64_t row = c.heads * c.group * c.value_dim;
  std::vector<double> values = drawn(c.batch * c.tokens * row, draw);
  for (std::int64_t i = 0; i < std::ssize(values); ++i) {
    if (i / row % c.tokens >= c.tokens - kChunk) values[i] *= c.fade;
  }
  return values;
}

// The tensors of a case: random inputs, poisoned outputs. Tensors of arguments that the case does not have are empty.
template <class T>
struct DeltaData {
  DeltaShape shape;
  DeltaRule rule;
  Tensor<T, 4> q, k, v, o, dout, dq, dk, dv, erase_key, derase_key;
  Tensor<T, 3> beta, dbeta;
  Tensor<State<T>, 4> g, dg;
  std::vector<std::int64_t> cu_seqlens;
  Tensor<State<T>, 4> initial_state, final_state, dfinal_state, dinitial_state;
  Tensor<State<T>, 5> chunk_states;

  explicit DeltaData(const DeltaCase& c) : DeltaData(c, c.layout) {
    Random random(17);
    const std::int64_t key_rows = c.batch * c.tokens * c.heads, rows = key_rows * c.group;
    const std::int64_t state = shape.sequences() * shape.value_heads * c.key_dim * c.value_dim;
    const auto normal = [&] { return random.normal(); };
    q.assign(drawn(q.view().size(), normal));
    k.assign(drawn_keys(key_rows, c.key_dim, c.key_norm, c.directions, random));
    v.assign(drawn_values(c, normal));
    beta.assign(drawn(rows, [&] { return random.uniform(0.05, 1.0); }));
    dout.assign(drawn(dout.view().size(), normal));
    if (c.initial_state) initial_state.assign(drawn(state, normal));
    if (c.dfinal_state) dfinal_state.assign(drawn(state, normal));
    if (c.decay != Decay::none) {
      g.assign(drawn(g.view().size(), [&] { return -random.uniform(0.0, c.gate); }));
    }
    if (c.erase_key == EraseKey::free) {
      erase_key.assign(drawn_keys(key_rows, c.key_dim, c.key_norm, c.directions, random));
    } else if (c.erase_key == EraseKey::gated) {
      std::vector<double> gated = k.values();
      for (double& x : gated) x *= random.uniform(0.0, 1.0);
      erase_key.assign(gated);
    }
  }

  // Copies the inputs from tensors of another dtype, as they were rounded there.
  template <class U>
  DeltaData(const DeltaCase& c, const DeltaData<U>& from) : DeltaData(c, Layout::contiguous) {
    q.assign(from.q.values());
    k.assign(from.k.values());
    v.assign(from.v.values());
    beta.assign(from.beta.values());
    dout.assign(from.dout.values());
    g.assign(from.g.values());
    erase_key.assign(from.erase_key.values());
    initial_state.assign(from.initial_state.values());
    dfinal_state.assign(from.dfinal_state.values());
  }

  DeltaForward<T> forward() {
    return {shape,
            rule,
            q.view(),
            k.view(),
            v.view(),
            beta.view(),
            g.view(),
            ends(),
            initial_state.view(),
            o.view(),
            final_state.view(),
            chunk_states.view(),
            {},
            erase_key.view()};
  }
  DeltaBackward<T> backward() {
    DeltaBackward<T> p = backward_of(forward());
    p.dout = dout.view();
    p.dfinal_state = dfinal_state.view();
    p.dq = dq.view();
    p.dk = dk.view();
    p.dv = dv.view();
    p.dbeta = dbeta.view();
    p.dg = dg.view();
    p.derase_key = derase_key.view();
    p.dinitial_state = dinitial_state.view();
    return p;
  }

  void poison_outputs() {
    for (auto* tensor : {&o, &dq, &dk, &dv, &derase_key}) tensor->poison();
    for (auto* tensor : {&final_state, &dinitial_state, &dg}) tensor->poison();
    dbeta.poison();
    chunk_states.poison();
  }

  bool sentinels_intact() const {
    bool intact = dbeta.sentinels_intact() && chunk_states.sentinels_intact();
    for (const auto* tensor : {&o, &dq, &dk, &dv, &derase_key}) intact = intact && tensor->sentinels_intact();
    for (const auto* tensor : {&final_state, &dinitial_state, &dg}) intact = intact && tensor->sentinels_intact();
    return intact;
  }

 private:
  View<const std::int64_t, 1> ends() const {
    if (cu_seqlens.empty()) return {};
    return View<const std::int64_t, 1>::contiguous(cu_seqlens.data(), {static_cast<std::int64_t>(cu_seqlens.size())});
  }

  DeltaData(const DeltaCase& c, Layout layout) : shape(c.shape()), rule(c.rule()), cu_seqlens(c.cu_seqlens) {
    const std::array<std::int64_t, 4> keys{c.batch, c.tokens, c.heads, c.key_dim};
    const std::array<std::int64_t, 4> queries{c.batch, c.token_rows(), c.heads, c.key_dim};
    const std::array<std::int64_t, 4> values{c.batch, c.tokens, shape.value_heads, c.value_dim};
    const std::array<std::int64_t, 4> outputs{c.batch, c.token_rows(), shape.value_heads, c.value_dim};
    const std::array<std::int64_t, 4> states{shape.sequences(), shape.value_heads, c.key_dim, c.value_dim};
    for (auto* tensor : {&k, &dk}) *tensor = Tensor<T, 4>(keys, layout);
    for (auto* tensor : {&q, &dq}) *tensor = Tensor<T, 4>(queries, layout);
    if (c.erase_key != EraseKey::none) erase_key = derase_key = Tensor<T, 4>(keys, layout);
    for (auto* tensor : {&v, &dv}) *tensor = Tensor<T, 4>(values, layout);
    for (auto* tensor : {&o, &dout}) *tensor = Tensor<T, 4>(outputs, layout);
    for (auto* tensor : {&beta, &dbeta}) *tensor = Tensor<T, 3>({c.batch, c.tokens, shape.value_heads}, layout);
    if (c.initial_state) initial_state = dinitial_state = Tensor<State<T>, 4>(states, layout);
    if (c.final_state) final_state = Tensor<State<T>, 4>(states, layout);
    if (c.dfinal_state) dfinal_state = Tensor<State<T>, 4>(states, layout);
    if (c.decay != Decay::none) {
      const std::int64_t channels = c.decay == Decay::channel ? c.key_dim : 1;
      g = dg = Tensor<State<T>, 4>({c.batch, c.token_rows(), shape.value_heads, channels}, layout);
    }
    chunk_states = Tensor<State<T>, 5>({c.batch, shape.chunks(), shape.value_heads, c.key_dim, c.value_dim}, layout);
  }
};

// Makes some gates minus infinity and others so strong that nothing survives a token.
template <class T>
void deepen_gates(DeltaData<T>& data) {
  Random random(29);
  std::vector<double> gates = data.g.values();
  for (double& g : gates) {
    const double u = random.uniform(0.0, 1.0);
    if (u < 0.02) {
      g = -std::numeric_limits<double>::infinity();
    } else if (u < 0.1) {
      g = -20;
    }
  }
  data.g.assign(gates);
}

}  // namespace efla::test
