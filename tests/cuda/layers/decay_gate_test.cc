// The decay gate on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "efla/cuda/layers/decay_gate.h"
#include "efla/ref/decay_gate.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

// The tensors of a decay gate: inputs with random numbers, outputs with NaN. Means of x and of dg that are not 0 keep
// the sums over rows from cancelling.
template <class T>
struct DecayGateData {
  Tensor<T, 2> z, dz;
  Tensor<float, 2> g, dg;
  Tensor<float, 1> bias, a_log, dbias, da_log;
  DecayActivation activation;

  DecayGateData(std::int64_t rows, std::int64_t heads, std::int64_t channels, Layout layout, DecayActivation with)
      : z({rows, heads * channels}, layout),
        dz(z),
        g({rows, heads * channels}, layout),
        dg(g),
        bias({heads * channels}),
        a_log({heads}),
        dbias(bias),
        da_log(a_log),
        activation(with) {
    Random random(static_cast<std::uint64_t>(rows + heads + channels));
    randomise(z, random);
    a_log.assign(drawn(heads, [&] { return 0.5 * random.normal(); }));
    bias.assign(drawn(bias.view().size(), [&] { return 1.5 + 0.5 * random.normal(); }));
    dg.assign(drawn(dg.view().size(), [&] { return 1 + random.normal(); }));
  }
  DecayGateForward<T> forward() { return {z.view(), bias.view(), a_log.view(), activation, kBound, g.view()}; }
  DecayGateBackward<T> backward() {
    return {z.view(), bias.view(), a_log.view(), activation, kBound, dg.view(), dz.view(), dbias.view(), da_log.view()};
  }
  static constexpr float kBound = -5;
};

template <class T>
void run_on_gpu(DecayGateData<T>& data) {
  const DeviceTensor<T, 2> z(data.z), dz(data.dz);
  const DeviceTensor<float, 2> g(data.g), dg(data.dg);
  const DeviceTensor<float, 1> bias(data.bias), a_log(data.a_log), dbias(data.dbias), da_log(data.da_log);
  const DecayGateForward<T> forward{z.view(), bias.view(), a_log.view(), data.activation, data.kBound, g.view()};
  const DecayGateBackward<T> backward{z.view(),  bias.view(), a_log.view(), data.activation, data.kBound,
                                      dg.view(), dz.view(),   dbias.view(), da_log.view()};
  const PoisonedWorkspace workspace(gpu::decay_gate_workspace_bytes(backward));
  replay_in_graph([&](cudaStream_t stream) {
    gpu::decay_gate(forward, stream);
    gpu::decay_gate(backward, workspace.get(), stream);
  });
  for (const auto* tensor : {&dbias, &da_log}) tensor->download();
  dz.download();
  g.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_decay_gate(const DecayGateData<T>& data) {
  DecayGateData<T> expected(data), got(data), again(data);
  ref::decay_gate(expected.forward());
  ref::decay_gate(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.g.sentinels_intact() && got.dz.sentinels_intact() && got.dbias.sentinels_intact() &&
              got.da_log.sentinels_intact());
  EXPECT_TRUE(got.g.same_bits(again.g) && got.dz.same_bits(again.dz) && got.dbias.same_bits(again.dbias) &&
              got.da_log.same_bits(again.da_log));
  EXPECT_LE(distance(got.g.values(), expected.g.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.dz.values(), expected.dz.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dbias.values(), expected.dbias.values()).rms, kSumTolerance);
  EXPECT_LE(distance(got.da_log.values(), expected.da_log.values()).rms, kSumTolerance);
}

constexpr DecayActivation kDecayActivations[]{DecayActivation::softplus, DecayActivation::sigmoid};
const char* name_of(DecayActivation activation) {
  return activation == DecayActivation::softplus ? "softplus" : "sigmoid";
}

template <class T>
void check_decay_gates(std::int64_t rows, std::int64_t heads, std::int64_t channels) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const auto activation : kDecayActivations) {
      SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " HV " << heads << " C " << channels
                                      << ' ' << name_of(layout) << ' ' << name_of(activation));
      check_decay_gate(DecayGateData<T>(rows, heads, channels, layout, activation));
    }
  }
}

TEST(CudaDecayGate, AgreesWithFloat64) {
  for (const std::int64_t heads : {1, 3, 8, 24}) {
    for (const std::int64_t channels : {1, 2, 5, 50, 64, 128}) {
      for (const std::int64_t rows : {1, 33, 1000}) {
        check_decay_gates<float>(rows, heads, channels);
        check_decay_gates<bfloat16>(rows, heads, channels);
      }
    }
  }
  check_decay_gates<bfloat16>(20000, 8, 1);
}

// Element by element, where exponentials of x would overflow or lose digits.
TEST(CudaDecayGate, IsExactAtTheLimits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<double> ends{-kInfinity, -1e30, -300, -90, -30, -17, -8,   -1e-6,     0,
                                 1e-6,       8,     17,   30,  90,  300, 1e30, kInfinity, NAN};
  for (const auto activation : kDecayActivations) {
    DecayGateData<float> got(1, 1, static_cast<std::int64_t>(ends.size()), Layout::contiguous, activation);
    got.z.assign(ends);
    got.bias.assign(std::vector<double>(ends.size(), 0));
    got.a_log.assign({0});  // rate is 1, whose rounding errors an exponential would multiply
    DecayGateData<float> expected(got);
    ref::decay_gate(expected.forward());
    ref::decay_gate(expected.backward());
    run_on_gpu(got);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const auto check = [&](double value, double right) {
        SCOPED_TRACE(testing::Message() << name_of(activation) << ' ' << ends[i]);
        if (!std::isfinite(right)) {
          EXPECT_TRUE(value == right || (std::isnan(value) && std::isnan(right))) << value << ' ' << right;
        } else {
          EXPECT_NEAR(value, right, 2e-6 * std::abs(right) + 1e-37);
        }
      };
      const auto d = static_cast<std::int64_t>(i);
      check(got.g.view()(0, d), expected.g.view()(0, d));
      check(got.dz.view()(0, d), expected.dz.view()(0, d));
    }
  }
}

// Rates whose exponential overflows, beside softplus that underflow.
TEST(CudaDecayGate, ARateThatOverflowsTimesASoftplusThatUnderflowsIsTheirProduct) {
  const std::vector<double> z{-300, -104, -100, -89, -30, -1, 0, 1};
  for (const auto activation : kDecayActivations) {
    for (const float a_log : {89.0F, 100.0F}) {
      DecayGateData<float> got(1, 1, static_cast<std::int64_t>(z.size()), Layout::contiguous, activation);
      got.z.assign(z);
      got.bias.assign(std::vector<double>(z.size(), 0));
      got.a_log.assign({a_log});
      DecayGateData<float> expected(got);
      ref::decay_gate(expected.forward());
      run_on_gpu(got);
      const bool softplus = activation == DecayActivation::softplus;
      for (std::int64_t d = 0; d < std::ssize(z); ++d) {
        SCOPED_TRACE(testing::Message() << name_of(activation) << ' ' << a_log << ' ' << z[d]);
        const float g = got.g.view()(0, d), right = expected.g.view()(0, d), dz = got.dz.view()(0, d);
        EXPECT_NEAR(std::exp(g), std::exp(right), 2e-6);
        EXPECT_TRUE(std::isfinite(dz));
        if (softplus && z[d] < -20 - (a_log - 60)) {
          EXPECT_NEAR(g, right, 2e-5 * std::abs(right) + 1e-37);
          EXPECT_NEAR(dz, right * expected.dg.view()(0, d), 2e-5 * std::abs(dz) + 1e-37);
        }
      }
      EXPECT_TRUE(std::isfinite(got.da_log.view()(0)));
    }
  }
}

}  // namespace
}  // namespace efla::test
