// The reference of a mixer's decode step against the references of its parts.
#include "efla/ops/mixer_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "efla/base/random.h"
#include "efla/ops/delta.h"
#include "efla/ops/layers/rms_norm.h"
#include "efla/ops/layers/short_conv.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

using Vector = std::vector<float>;

constexpr std::int64_t kBatch = 2, kHeads = 2, kValueHeads = 4, kKeys = 3, kValues = 5, kTaps = 4, kPool = 3;
constexpr std::int64_t kColumns = kValueHeads * kValues, kChannels = 2 * kHeads * kKeys + kColumns;

struct Data {
  Random random{11};
  Vector qkv = drawn(kBatch * kChannels), taps = drawn(kChannels * kTaps), beta = drawn(kBatch * kValueHeads),
         beta_factor = drawn(kValueHeads), decay = drawn(kBatch * kValueHeads * kKeys), rate = drawn(kValueHeads),
         bias = drawn(kValueHeads * kKeys), norm = drawn(kValues), gate = drawn(kBatch * kColumns),
         gate_bias = drawn(kColumns), history = drawn(kPool * (kTaps - 1) * kChannels),
         states = drawn(kPool * kValueHeads * kKeys * kValues), o = Vector(kBatch * kColumns, NAN);
  std::vector<std::int64_t> slots{2, 0};

  Vector drawn(std::int64_t count) {
    Vector values(count);
    for (auto& value : values) value = static_cast<float>(random.normal());
    return values;
  }
  MixerStep problem() {
    MixerStep p;
    p.shape = {kBatch, 1, kHeads, kValueHeads, kKeys, kValues};
    p.rule.step = parse_step_size("exact");
    p.rule.decay = Decay::channel;
    p.rule.qk_l2norm = true;
    const auto rows = [](Vector& data, std::int64_t n) {
      return View<float, 2>::contiguous(data.data(), {static_cast<std::int64_t>(data.size()) / n, n});
    };
    const auto row = [](Vector& data) {
      return View<float, 1>::contiguous(data.data(), {static_cast<std::int64_t>(data.size())});
    };
    p.qkv = rows(qkv, kChannels);
    p.taps = rows(taps, kTaps);
    p.beta = rows(beta, kValueHeads);
    p.beta_activation = BetaActivation::softplus;
    p.beta_factor = row(beta_factor);
    p.decay = rows(decay, kValueHeads * kKeys);
    p.rate = row(rate);
    p.decay_bias = row(bias);
    p.norm_weight = row(norm);
    p.norm_eps = 1e-2F;
    p.gate = rows(gate, kColumns);
    p.gate_bias = row(gate_bias);
    p.slots = View<const std::int64_t, 1>::contiguous(slots.data(), {kBatch});
    p.history = View<float, 3>::contiguous(history.data(), {kPool, kTaps - 1, kChannels});
    p.states = View<float, 4>::contiguous(states.data(), {kPool, kValueHeads, kKeys, kValues});
    p.o = rows(o, kColumns);
    return p;
  }
};

double softplus(double x) { return std::log1p(std::exp(x)); }

TEST(MixerStep, TheReferenceIsItsPartsOneAfterTheOther) {
  Data got, data;
  mixer_step(got.problem(), {"ref"});

  const MixerStep p = data.problem();
  Vector window(kBatch * kTaps * kChannels), mixed(window.size());
  Vector beta(kBatch * kValueHeads), g(kBatch * kValueHeads * kKeys), gate(kBatch * kColumns);
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const float* history = p.history.at(p.slots(b));
    std::copy_n(history, (kTaps - 1) * kChannels, &window[b * kTaps * kChannels]);
    std::copy_n(p.qkv.at(b), kChannels, &window[((b + 1) * kTaps - 1) * kChannels]);
    for (std::int64_t h = 0; h < kValueHeads; ++h) {
      beta[b * kValueHeads + h] = static_cast<float>(softplus(p.beta(b, h)) * p.beta_factor(h));
      for (std::int64_t i = h * kKeys; i < (h + 1) * kKeys; ++i) {
        g[b * kValueHeads * kKeys + i] = static_cast<float>(-p.rate(h) * softplus(p.decay(b, i) + p.decay_bias(i)));
      }
    }
    for (std::int64_t c = 0; c < kColumns; ++c) gate[b * kColumns + c] = p.gate(b, c) + p.gate_bias(c);
  }
  const std::array<std::int64_t, 3> shape{kBatch, kTaps, kChannels};
  short_conv_forward<float>(
      {View<const float, 3>::contiguous(window.data(), shape), p.taps, View<float, 3>::contiguous(mixed.data(), shape)},
      {"ref"});
  const float* const qkv = mixed.data() + (kTaps - 1) * kChannels;
  const auto heads_of = [&](const float* first, std::int64_t count, std::int64_t dim) {
    return View<const float, 3>{first, {kBatch, count, dim}, {kTaps * kChannels, dim, 1}};
  };
  DeltaStep<float> step;
  step.shape = p.shape;
  step.rule = p.rule;
  step.q = heads_of(qkv, kHeads, kKeys);
  step.k = heads_of(qkv + kHeads * kKeys, kHeads, kKeys);
  step.v = heads_of(qkv + 2 * kHeads * kKeys, kValueHeads, kValues);
  step.beta = View<const float, 2>::contiguous(beta.data(), {kBatch, kValueHeads});
  step.g = View<const float, 3>::contiguous(g.data(), {kBatch, kValueHeads, kKeys});
  step.state = p.states;
  step.slots = p.slots;
  step.o = View<float, 3>::contiguous(data.o.data(), {kBatch, kValueHeads, kValues});
  delta_step(step, {"ref"});
  const std::array<std::int64_t, 2> heads{kBatch * kValueHeads, kValues};
  const auto o = View<float, 2>::contiguous(data.o.data(), heads);
  rms_norm_forward<float>(
      {o, p.norm_weight, p.norm_eps, o, View<const float, 2>::contiguous(gate.data(), heads), GateActivation::silu},
      {"ref"});

  for (std::size_t i = 0; i < got.o.size(); ++i) EXPECT_NEAR(got.o[i], data.o[i], 1e-5) << i;
  for (std::size_t i = 0; i < got.states.size(); ++i) EXPECT_NEAR(got.states[i], data.states[i], 1e-5) << i;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const std::int64_t first = p.slots(b) * (kTaps - 1) * kChannels;
    for (std::int64_t i = 0; i < (kTaps - 1) * kChannels; ++i) {
      EXPECT_EQ(got.history[first + i], window[(b * kTaps + 1) * kChannels + i]);
    }
  }
}

TEST(MixerStep, RefusesWhatDoesNotFit) {
  Data data;
  MixerStep p = data.problem();
  EXPECT_FALSE(takes_mixer_step(p));
  p.gate.extent[1] = 7;
  test::expect_error([&] { mixer_step(p, {"ref"}); }, "gate", "got shape [2, 7], expected shape [2, 20]");
  p = data.problem();
  p.history.extent[1] = 2;
  test::expect_error([&] { mixer_step(p, {"ref"}); }, "history", "expected shape [3, 3, 32]");
}

}  // namespace
}  // namespace efla
