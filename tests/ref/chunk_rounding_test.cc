// The accuracy of the CUDA kernels' chunkwise algorithm against float64, where no GPU is: its rounding oracle over the
// test matrix and over the keys that are hard for it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "efla/ref/delta.h"
#include "tests/support/chunk_bwd_oracle.h"
#include "tests/support/chunk_oracle.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"
#include "tests/support/hard_keys.h"
#include "tests/support/plain_delta.h"
#include "tests/support/reach.h"

namespace efla::test {
namespace {

struct Errors {
  Distance o, state;
};

// The cases of the matrix that the kernels take with inputs of type E.
template <class E>
std::vector<DeltaCase> matrix() {
  std::vector<DeltaCase> cases;
  for (const auto& family : {delta_cases(), two_key_cases()}) {
    for (const DeltaCase& c : family) {
      if (std::is_same_v<E, bfloat16> || float16_holds(c)) cases.push_back(c);
    }
  }
  return cases;
}

// The oracle's distance from the reference.
template <class E>
Errors oracle_errors(const DeltaCase& c, DeltaData<E>& data, int segments = 1) {
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  chunk_oracle_forward(data.forward(), segments);
  EXPECT_TRUE(data.sentinels_intact());
  return {distance(data.o.values(), exact.o.values()), distance(data.final_state.values(), exact.final_state.values())};
}

// Sums over a chunk round relative to what its tokens wrote and erased. Where few dimensions or long keys make every
// token erase nearly all that the ones before it wrote, little is left of those sums, and the error relative to it is
// larger.
template <class E>
void expect_matrix() {
  double worst = 0, worst_erasing = 0;
  for (const DeltaCase& c : matrix<E>()) {
    DeltaData<E> data(c);
    const Errors errors = oracle_errors(c, data);
    const double error = std::max(errors.o.rms, c.final_state ? errors.state.rms : 0.0);
    const bool erasing = c.key_dim < 16 || c.key_norm > 5;
    EXPECT_LE(error, kUnit<E> * (erasing ? 1.5e-2 : 6e-3)) << name_of(c);
    (erasing ? worst_erasing : worst) = std::max(erasing ? worst_erasing : worst, error);
  }
  std::printf("largest relative RMS error over the matrix: %.2e, where tokens erase nearly all %.2e\n", worst,
              worst_erasing);
}

TEST(ChunkRounding, Matrix) { expect_matrix<bfloat16>(); }
TEST(ChunkRoundingFloat16, Matrix) { expect_matrix<float16>(); }

// Limits are what flash-linear-attention's chunk kernel was measured to reach on such keys with the gain of the exact
// step.
template <class E>
void expect_hard_keys() {
  struct Keys {
    const char* name;
    double spread;
    bool log_normal;
    double limit;
  };
  for (const Keys& keys :
       {Keys{"random", 1e3, false, 4.1e-3}, {"cone .3", 0.3, true, 6.0e-3}, {"cone .05", 0.05, false, 1.7e-2}}) {
    for (const char* step : {"exact", "euler"}) {
      DeltaCase c{step, 1, 1, false, 1, 1024, 1, 128, 64, 1, Layout::contiguous, false, true, false};
      DeltaData<E> data(c);
      draw_cone(data, keys.spread, keys.log_normal && std::string(step) == "exact");
      for (const int segments : {1, 3, 7}) {
        const Errors errors = oracle_errors(c, data, segments);
        std::printf("%s, %s, %d segments: o %.2e, state %.2e\n", step, keys.name, segments, errors.o.rms,
                    errors.state.rms);
        EXPECT_LE(errors.o.rms, kUnit<E> * keys.limit) << step << ' ' << keys.name << ' ' << segments;
        EXPECT_LE(errors.state.rms, kUnit<E> * keys.limit) << step << ' ' << keys.name << ' ' << segments;
      }
    }
  }
}

TEST(ChunkRounding, HardKeys) { expect_hard_keys<bfloat16>(); }
TEST(ChunkRoundingFloat16, HardKeys) { expect_hard_keys<float16>(); }

// The largest error of the oracle's gradients, and whose it is.
struct WorstGradient {
  double error = 0;
  std::string name;
};

template <class E>
WorstGradient oracle_gradient_error(const DeltaCase& c, DeltaData<E>& data) {
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  chunk_oracle_backward(data.forward(), data.backward());
  EXPECT_TRUE(data.sentinels_intact());
  const Results got = backward_results(data), expected = backward_results(exact);
  WorstGradient worst;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = distance(got[i].second, expected[i].second).rms;
    if (error > worst.error) worst = {error, got[i].first};
  }
  return worst;
}

template <class E>
void expect_gradients() {
  WorstGradient worst, worst_erasing;
  for (const DeltaCase& c : matrix<E>()) {
    DeltaData<E> data(c);
    const WorstGradient of_case = oracle_gradient_error(c, data);
    const bool erasing = c.key_dim < 16 || c.key_norm > 5;
    EXPECT_LE(of_case.error, kUnit<E> * (erasing ? 3e-2 : 1.2e-2)) << name_of(c) << ' ' << of_case.name;
    WorstGradient& largest = erasing ? worst_erasing : worst;
    if (of_case.error > largest.error) largest = of_case;
  }
  std::printf("largest relative RMS error of gradients: %.2e (%s), where tokens erase nearly all %.2e (%s)\n",
              worst.error, worst.name.c_str(), worst_erasing.error, worst_erasing.name.c_str());
}

TEST(ChunkRounding, Gradients) { expect_gradients<bfloat16>(); }
TEST(ChunkRoundingFloat16, Gradients) { expect_gradients<float16>(); }

template <class E>
void expect_gradients_of_hard_keys() {
  for (const auto& [name, spread] : {std::pair{"random", 1e3}, {"cone .3", 0.3}, {"cone .05", 0.05}}) {
    for (const char* step : {"exact", "euler"}) {
      DeltaCase c{step, 1, 1, false, 1, 512, 1, 128, 64, 1, Layout::contiguous, false, true, true};
      DeltaData<E> data(c);
      draw_cone(data, spread, false);
      const WorstGradient worst = oracle_gradient_error(c, data);
      std::printf("%s, %s: largest gradient error %.2e (%s)\n", step, name, worst.error, worst.name.c_str());
      EXPECT_LE(worst.error, kUnit<E> * (spread < 0.1 ? 1.2e-2 : 6e-3)) << step << ' ' << name << ' ' << worst.name;
    }
  }
}

TEST(ChunkRounding, GradientsOfHardKeys) { expect_gradients_of_hard_keys<bfloat16>(); }
TEST(ChunkRoundingFloat16, GradientsOfHardKeys) { expect_gradients_of_hard_keys<float16>(); }

// Runs the oracle of float32 inputs, forward and backward; returns the largest of its errors, each divided by what is
// allowed.
double float32_error_of_allowed(const DeltaCase& c, DeltaData<float>& data,
                                std::string_view kind = "oracle of float32 by chunks") {
  const Tolerance& tolerance = tolerance_of(kind);
  DeltaData<float> plain(c, data);
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  plain_forward(plain.forward());
  plain_backward(plain.backward(), plain.initial_state.view());
  chunk_oracle_forward(data.forward());
  chunk_oracle_backward(data.forward(), data.backward());
  EXPECT_TRUE(data.sentinels_intact());
  double worst = 0;
  const auto compare = [&](const Results& got, const Results& expected, const Results& naive) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(disagreement(got[i].second, expected[i].second, naive[i].second, tolerance), "")
          << name_of(c) << ' ' << got[i].first;
      const double allowed = tolerance.factor * distance(naive[i].second, expected[i].second).rms + tolerance.floor;
      worst = std::max(worst, distance(got[i].second, expected[i].second).rms / allowed);
    }
  };
  compare(forward_results(data), forward_results(exact), forward_results(plain));
  compare(backward_results(data), backward_results(exact), backward_results(plain));
  return worst;
}

TEST(ChunkRoundingFloat32, Matrix) {
  double worst = 0;
  for (const auto& family : {delta_cases(), two_key_cases()}) {
    for (const DeltaCase& c : family) {
      if (c.key_dim > 128) continue;
      DeltaData<float> data(c);
      worst = std::max(worst, float32_error_of_allowed(c, data));
    }
  }
  // Of the state that is left where all was erased the naive loop has lost digits too, so that the caps do not hold.
  for (const DeltaCase& c : fading_cases()) {
    DeltaData<float> data(c);
    worst = std::max(worst, float32_error_of_allowed(c, data, "fading float32 by chunks"));
  }
  std::printf("float32, matrix: errors up to %.2f of what is allowed\n", worst);
}

TEST(ChunkRoundingFloat32, HardKeys) {
  for (const auto& [name, spread] : {std::pair{"random", 1e3}, {"cone .3", 0.3}, {"cone .05", 0.05}}) {
    for (const char* step : {"exact", "euler"}) {
      for (const Decay decay : {Decay::none, Decay::channel}) {
        DeltaCase c{step, 1, 1, false, 1, 784, 1, 64, 64, 1, Layout::contiguous, false, true, true};
        c.decay = decay;
        c.gate = 0.1;
        DeltaData<float> data(c);
        draw_cone(data, spread, false);
        std::printf("float32, %s, %s%s: errors up to %.2f of what is allowed\n", step, name,
                    decay == Decay::channel ? ", gates per channel" : "", float32_error_of_allowed(c, data));
      }
    }
  }
}

// Gates per channel of which some are minus infinity, some so strong that nothing survives a token, and the others
// weak.
template <class E>
void expect_deep_channel_gates() {
  DeltaCase c{"exact", 1, 1, true, 1, 200, 1, 128, 64, 1, Layout::contiguous, true, true, true};
  c.decay = Decay::channel;
  c.gate = 0.05;
  DeltaData<E> data(c);
  deepen_gates(data);
  const Errors errors = oracle_errors(c, data);
  const WorstGradient worst = oracle_gradient_error(c, data);
  std::printf("deep gates per channel: o %.2e, state %.2e, largest gradient error %.2e (%s)\n", errors.o.rms,
              errors.state.rms, worst.error, worst.name.c_str());
  EXPECT_LE(std::max(errors.o.rms, errors.state.rms), kUnit<E> * 6e-3);
  EXPECT_LE(worst.error, kUnit<E> * 6e-3) << worst.name;
}

TEST(ChunkRounding, DeepChannelGates) { expect_deep_channel_gates<bfloat16>(); }
TEST(ChunkRoundingFloat16, DeepChannelGates) { expect_deep_channel_gates<float16>(); }

// Returns a case of 200 tokens with gates per channel down to −gate and keys of the given length.
DeltaCase channel_case(bool qk_l2norm, double length, double gate) {
  DeltaCase c{
      qk_l2norm ? "euler" : "exact", 1, 1, qk_l2norm, 1, 200, 1, 128, 64, length, Layout::contiguous, true, true, true};
  c.decay = Decay::channel;
  c.gate = gate;
  return c;
}

// Gates per channel of every strength, of keys and queries of every length: the decays of a block of tokens stay within
// the range of exponents of float16 in all, some or none of the channels.
template <class E>
void expect_channel_gates() {
  for (const double gate : {0.05, 0.3, 1.0, 2.0, 5.0}) {
    for (const bool qk_l2norm : {false, true}) {
      for (const double length : qk_l2norm ? std::vector{1e-3, 1.0, 1e3} : std::vector{1e-2, 1.0, 10.0}) {
        const DeltaCase c = channel_case(qk_l2norm, length, gate);
        DeltaData<E> data(c);
        const Errors errors = oracle_errors(c, data);
        const WorstGradient worst = oracle_gradient_error(c, data);
        EXPECT_LE(std::max(errors.o.rms, errors.state.rms), kUnit<E> * 6e-3) << gate << ' ' << c.step << ' ' << length;
        EXPECT_LE(worst.error, kUnit<E> * 6e-3) << gate << ' ' << c.step << ' ' << length << ' ' << worst.name;
        std::printf("gates of %g, %s, keys of length %g: o %.2e, state %.2e, largest gradient error %.2e (%s)\n", gate,
                    c.step, length, errors.o.rms, errors.state.rms, worst.error, worst.name.c_str());
      }
    }
  }
}

TEST(ChunkRounding, ChannelGates) { expect_channel_gates<bfloat16>(); }
TEST(ChunkRoundingFloat16, ChannelGates) { expect_channel_gates<float16>(); }

TEST(ChunkRoundingFloat32, ChannelGates) {
  for (const bool deep : {false, true}) {
    for (const double gate : {0.05, 1.0, 4.8, 20.0}) {
      for (const bool qk_l2norm : {false, true}) {
        const DeltaCase c = channel_case(qk_l2norm, 1, gate);
        DeltaData<float> data(c);
        if (deep) deepen_gates(data);
        std::printf("float32, gates of %g%s, %s: errors up to %.2f of what is allowed\n", gate,
                    deep ? ", some of them deep" : "", c.step, float32_error_of_allowed(c, data));
      }
    }
  }
}

// A NaN token reaches its own chunk beside what it reaches in the recurrence, also where sequences are cut into
// segments.
template <class T>
void expect_contained_oracle(Decay decay, int segments, EraseKey erase_key = EraseKey::none) {
  DeltaCase c{"exact", 1, 1, true, 1, 300, 2, 16, 8, 1, Layout::contiguous, true, true, true};
  c.cu_seqlens = {0, 80, 230, 300};
  c.decay = decay;
  c.gate = 0.1;
  c.erase_key = erase_key;
  expect_contained<T>(c, ChunkOracle<T>::kTokens, {{1, 0}, {1, 70}, {1, 149}}, [&](DeltaData<T>& data) {
    chunk_oracle_forward(data.forward(), segments);
    chunk_oracle_backward(data.forward(), data.backward());
    return all_results(data);
  });
}

TEST(ChunkRounding, NanToken) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const int segments : {1, 3}) expect_contained_oracle<bfloat16>(decay, segments);
  }
}

TEST(ChunkRoundingFloat16, NanToken) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const int segments : {1, 3}) expect_contained_oracle<float16>(decay, segments);
  }
}

TEST(ChunkRoundingFloat32, NanToken) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) expect_contained_oracle<float>(decay, 1);
}

TEST(ChunkRounding, NanTokenWithTwoKeys) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    expect_contained_oracle<bfloat16>(decay, 3, EraseKey::gated);
    expect_contained_oracle<float16>(decay, 1, EraseKey::gated);
    expect_contained_oracle<float>(decay, 1, EraseKey::gated);
  }
}

// The case that grew without bound in a kernel whose diagonal inverse was rounded: one unit key repeated. Here the
// error is that of rounding, and does not grow.
TEST(ChunkRounding, RepeatedKeyStaysBounded) {
  DeltaCase c{"euler", 1, 1, false, 1, 4096, 1, 64, 16, 1, Layout::contiguous, false, true, false};
  c.decay = Decay::scalar;
  DeltaData<bfloat16> data(c);
  std::vector<double> one(c.key_dim, 1 / std::sqrt(static_cast<double>(c.key_dim))), keys;
  for (std::int64_t t = 0; t < c.tokens; ++t) keys.insert(keys.end(), one.begin(), one.end());
  data.k.assign(keys);
  data.beta.assign(std::vector<double>(c.tokens, 0.835));
  data.g.assign(std::vector<double>(c.tokens, -1e-3));
  const Errors errors = oracle_errors(c, data);
  EXPECT_LE(errors.state.rms, 0.1);
  EXPECT_LE(errors.o.rms, 0.1);
}

}  // namespace
}  // namespace efla::test
