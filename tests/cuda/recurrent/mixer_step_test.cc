// The mixer step on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cuda/recurrent/mixer_step.h"
#include "efla/ref/mixer_step.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

struct StepCase {
  std::string step = "exact";
  std::int64_t batch = 1, heads = 2, group = 1, key_dim = 128, value_dim = 128, taps = 4;
  Decay decay = Decay::none;
  DecayActivation decay_activation = DecayActivation::softplus;
  BetaActivation beta = BetaActivation::sigmoid;
  bool l2norm = false, norm = true, gate = false, gate_bias = false, slots = false;
  GateActivation gate_activation = GateActivation::silu;
  double erase_scale = 1.0;
};

std::string text_of(const StepCase& c) {
  return c.step + " B " + std::to_string(c.batch) + " H " + std::to_string(c.heads) + " x " + std::to_string(c.group) +
         " K " + std::to_string(c.key_dim) + " V " + std::to_string(c.value_dim) + " W " + std::to_string(c.taps) +
         " decay " + std::string(name_of(c.decay)) + (c.l2norm ? " l2norm" : "") + (c.gate ? " gate" : "");
}

// The tensors of a mixer step; inputs are the same for the same case.
struct StepData {
  StepCase c;
  DeltaShape shape;
  Tensor<float, 2> qkv, taps, beta, decay, gate, o;
  Tensor<float, 1> beta_factor, rate, decay_bias, norm_weight, gate_bias;
  std::vector<std::int64_t> slots;
  Tensor<float, 3> history;
  Tensor<float, 4> states;

  explicit StepData(const StepCase& from) : c(from) {
    Random random(static_cast<std::uint64_t>(c.key_dim + c.value_dim + c.heads));
    const std::int64_t value_heads = c.heads * c.group, values = value_heads * c.value_dim;
    const std::int64_t channels = 2 * c.heads * c.key_dim + values, pool = c.slots ? c.batch + 2 : c.batch;
    shape = {c.batch, 1, c.heads, value_heads, c.key_dim, c.value_dim};
    qkv = random_tensor<float, 2, Layout::sliced>({c.batch, channels}, random);
    taps = random_tensor<float, 2>({channels, c.taps}, random, 0.5);
    if (c.beta != BetaActivation::one) beta = random_tensor<float, 2>({c.batch, value_heads}, random);
    beta_factor = random_tensor<float, 1>({value_heads}, random, 0.1);
    if (c.decay != Decay::none) {
      const std::int64_t count = c.decay == Decay::channel ? value_heads * c.key_dim : value_heads;
      decay = random_tensor<float, 2, Layout::sliced>({c.batch, count}, random);
      decay_bias = random_tensor<float, 1>({count}, random);
      rate = Tensor<float, 1>({value_heads});
      rate.assign(drawn(value_heads, [&] { return 0.1 + random.uniform(); }));
    }
    if (c.norm) norm_weight = random_tensor<float, 1>({c.value_dim}, random);
    if (c.gate) gate = random_tensor<float, 2, Layout::sliced>({c.batch, values}, random);
    if (c.gate_bias) gate_bias = random_tensor<float, 1>({values}, random);
    if (c.slots) {
      for (std::int64_t b = 0; b < c.batch; ++b) slots.push_back(b == 1 ? -1 : pool - 1 - b);
    }
    if (c.taps > 1) history = random_tensor<float, 3>({pool, c.taps - 1, channels}, random);
    states = random_tensor<float, 4>({pool, value_heads, c.key_dim, c.value_dim}, random, 0.3);
    o = Tensor<float, 2>({c.batch, values}, Layout::sliced);
  }

  // The problem on the tensors of `at(tensor)`, which are this object's or copies.
  template <class At>
  MixerStep problem(At&& at) {
    MixerStep p;
    p.shape = shape;
    p.rule.step = parse_step_size(c.step);
    p.rule.step.erase_scale = c.erase_scale;
    p.rule.decay = c.decay;
    p.rule.qk_l2norm = c.l2norm;
    p.qkv = at(qkv);
    p.taps = at(taps);
    p.beta = at(beta);
    p.beta_activation = c.beta;
    p.beta_factor = at(beta_factor);
    p.decay = at(decay);
    p.decay_activation = c.decay_activation;
    p.rate = at(rate);
    p.decay_bias = at(decay_bias);
    p.bound = -5.0F;
    p.norm_weight = at(norm_weight);
    p.norm_eps = 1e-5F;
    p.gate = at(gate);
    p.gate_bias = at(gate_bias);
    p.gate_activation = c.gate_activation;
    if (c.slots) p.slots = View<const std::int64_t, 1>::contiguous(slots.data(), {c.batch});
    p.history = at(history);
    p.states = at(states);
    p.o = at(o);
    return p;
  }
};

// Runs two steps on the device with the same inputs.
void run_on_gpu(StepData& data, bool in_graph) {
  const DeviceTensor<float, 2> qkv(data.qkv), taps(data.taps), beta(data.beta), decay(data.decay), gate(data.gate),
      o(data.o);
  const DeviceTensor<float, 1> beta_factor(data.beta_factor), rate(data.rate), decay_bias(data.decay_bias),
      norm_weight(data.norm_weight), gate_bias(data.gate_bias);
  const DeviceBytes slots(data.slots.size() * sizeof(std::int64_t));
  if (data.c.slots) {
    gpu::check(cudaMemcpy(slots.data(), data.slots.data(), slots.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  const DeviceTensor<float, 3> history(data.history);
  const DeviceTensor<float, 4> states(data.states);
  MixerStep p = data.problem([](auto& tensor) { return tensor.view(); });
  p.qkv = qkv.view();
  p.taps = taps.view();
  p.beta = beta.view();
  p.decay = decay.view();
  p.gate = gate.view();
  p.o = o.view();
  p.beta_factor = beta_factor.view();
  p.rate = rate.view();
  p.decay_bias = decay_bias.view();
  p.norm_weight = norm_weight.view();
  p.gate_bias = gate_bias.view();
  p.slots.data = static_cast<const std::int64_t*>(slots.data());
  p.history = history.view();
  p.states = states.view();
  ASSERT_EQ(gpu::mixer_step_refusal(p), "");
  if (in_graph) {
    replay_in_graph([&](cudaStream_t stream) { gpu::mixer_step(p, stream); });
  } else {
    gpu::mixer_step(p, nullptr);
    gpu::mixer_step(p, nullptr);
  }
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  o.download();
  history.download();
  states.download();
}

void check_step(const StepCase& c) {
  SCOPED_TRACE(text_of(c));
  StepData expected(c), got(c), replayed(c);
  const auto reference = expected.problem([](auto& tensor) { return tensor.view(); });
  ref::mixer_step(reference);
  ref::mixer_step(reference);
  run_on_gpu(got, false);
  run_on_gpu(replayed, true);
  EXPECT_TRUE(got.o.sentinels_intact() && got.states.sentinels_intact() && got.history.sentinels_intact());
  EXPECT_TRUE(got.o.same_bits(replayed.o) && got.states.same_bits(replayed.states));
  EXPECT_TRUE(got.history.same_bits(expected.history));
  const double most = tolerance_of("float32").cap;
  EXPECT_LE(distance(got.o.values(), expected.o.values()).rms, most);
  EXPECT_LE(distance(got.states.values(), expected.states.values()).rms, most);
}

class CudaMixerStep : public testing::Test {
 protected:
  void SetUp() override {
    const auto reason = why_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    StepData data(StepCase{});
    const DeviceTensor<float, 4> states(data.states);
    MixerStep p = data.problem([](auto& tensor) { return tensor.view(); });
    p.states = states.view();
    const auto refusal = gpu::mixer_step_refusal(p);
    if (!refusal.empty()) GTEST_SKIP() << refusal;
  }
};

// Few heads and more than a GPU's multiprocessors divided by eight, which have a kernel each.
constexpr std::int64_t kHeads[] = {2, 18};

TEST_F(CudaMixerStep, IsTheFloat64Step) {
  for (const std::int64_t heads : kHeads) {
    for (const std::int64_t key_dim : {20, 64, 128}) {
      for (const std::int64_t value_dim : {4, 36, 64, 128}) {
        for (const std::int64_t group : {1, 3}) {
          StepCase c{.heads = heads, .group = group, .key_dim = key_dim, .value_dim = value_dim};
          check_step(c);
          c.l2norm = c.slots = true;
          c.batch = 3;
          c.decay = Decay::scalar;
          check_step(c);
          c.decay = Decay::channel;
          c.gate = c.gate_bias = true;
          c.gate_activation = GateActivation::sigmoid;
          check_step(c);
        }
      }
    }
  }
}

TEST_F(CudaMixerStep, HasEveryChoiceOfAMixer) {
  for (const std::int64_t heads : kHeads) {
    const auto check = [&](StepCase c) {
      c.heads = heads;
      check_step(c);
    };
    for (const char* step : {"euler", "rk2", "rk4", "exact", "implicit_euler", "trapezoid"}) check({.step = step});
    for (const auto beta : {BetaActivation::softplus, BetaActivation::one}) check({.beta = beta});
    for (const std::int64_t taps : {1, 2, 3, 8}) check({.taps = taps});
    check({.step = "euler", .beta = BetaActivation::one, .erase_scale = 0.0});
    check({.decay = Decay::channel, .decay_activation = DecayActivation::sigmoid});
    check({.norm = false});
    check({.norm = false, .gate = true});
    check({.gate = true});
  }
  check_step({.batch = 64, .heads = 8, .slots = true});
}

// An H100 and an H200 have 132 multiprocessors: with 16 heads a text has clusters, with 17 it has not.
TEST_F(CudaMixerStep, TakesSeveralValueHeadsWithShortAndLongConvolutions) {
  for (const std::int64_t group : {1, 5}) {
    for (const std::int64_t taps : {1, 8}) {
      for (const std::int64_t heads : {16, 17}) check_step({.heads = heads, .group = group, .taps = taps});
      for (const std::int64_t heads : kHeads) {
        check_step({.batch = 3, .heads = heads, .group = group, .taps = taps, .decay = Decay::channel, .slots = true});
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
