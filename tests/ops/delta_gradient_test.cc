// The float64 reference against itself: its gradients against finite differences, and its chunk algorithm, with the
// paper's W, U and T written out, against the token recurrence.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "efla/ref/delta.h"
#include "tests/support/chunk_reference.h"
#include "tests/support/compare.h"
#include "tests/support/delta_case.h"

namespace efla::test {
namespace {

// Every step size with two keys. Products κᵀk of free keys have either sign.
std::vector<DeltaCase> two_key_cases() {
  constexpr auto kLayout = Layout::contiguous;
  std::vector<DeltaCase> cases;
  for (const char* step : {"euler", "rk1", "rk2", "rk4", "exact", "implicit_euler", "trapezoid"}) {
    for (const EraseKey erase_key : {EraseKey::gated, EraseKey::free}) {
      for (const bool qk_l2norm : {false, true}) {
        cases.push_back({step, 1, 1, qk_l2norm, 1, 6, 2, 3, 4, 1.5, kLayout, true, true, true});
        cases.back().erase_key = erase_key;
      }
    }
    cases.back().erase_scale = 1.5;
    cases.back().decay = Decay::channel;
    cases.back().group = 2;
  }
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    cases.push_back({"exact", 0.5, 3, true, 1, 9, 2, 3, 2, 1.5, kLayout, true, true, true});
    cases.back().decay = decay;
    cases.back().cu_seqlens = {0, 4, 4, 9};
    cases.back().erase_key = EraseKey::gated;
  }
  return cases;
}

std::vector<DeltaCase> cases() {
  constexpr auto kLayout = Layout::contiguous;
  std::vector<DeltaCase> cases{
      {"exact", 1, 1, false, 2, 5, 2, 3, 2, 1.5, kLayout, true, true, true},
      {"exact", 1, 1, false, 1, 4, 1, 2, 3, 3, kLayout, true, true, true},
      {"exact", 1, 1, false, 1, 4, 1, 2, 3, 0.01, kLayout, true, true, true},
      {"exact", 1, 1, false, 1, 35, 1, 3, 2, 1, kLayout, true, true, true},
      {"exact", 1, 1, true, 1, 5, 2, 3, 4, 2, kLayout, true, true, true},
      {"exact", 2, 1, true, 1, 5, 2, 3, 4, 2, kLayout, true, true, true},
      {"exact", 0.5, 3, false, 1, 5, 2, 3, 4, 1, kLayout, true, true, true},
      {"exact", 0, 1, false, 1, 5, 2, 3, 4, 1, kLayout, true, true, true},
      {"euler", 1, 1, true, 1, 5, 2, 4, 3, 1, kLayout, true, true, true},
      {"euler", 2, 1, false, 1, 5, 2, 4, 3, 1, kLayout, false, false, false},
      {"rk1", 1, 1, false, 1, 5, 2, 3, 3, 1.2, kLayout, true, true, true},
      {"rk2", 1, 1, false, 1, 5, 2, 3, 3, 1.2, kLayout, true, true, true},
      {"rk4", 1, 1, true, 1, 5, 2, 3, 3, 1.2, kLayout, true, true, true},
      {"rk7", 1, 1, false, 1, 5, 2, 3, 3, 1.6, kLayout, true, true, true},
      {"implicit_euler", 1, 1, false, 1, 5, 2, 3, 3, 2, kLayout, true, true, true},
      {"trapezoid", 1, 1, false, 1, 5, 2, 3, 3, 2, kLayout, true, true, true},
      {"trapezoid", 1, 1, true, 1, 5, 2, 3, 3, 2, kLayout, false, true, true},
  };
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    for (const char* step : {"exact", "euler"}) {
      cases.push_back({step, 1, 1, true, 1, 7, 2, 3, 4, 1.5, kLayout, true, true, true});
      cases.back().decay = decay;
    }
    cases.back().group = 2;
  }
  cases.push_back({"exact", 1, 1, false, 1, 9, 2, 3, 2, 1.5, kLayout, true, true, true});
  cases.back().cu_seqlens = {0, 4, 4, 9};
  for (const auto& more : two_key_cases()) cases.push_back(more);
  return cases;
}

class DeltaGradient : public testing::TestWithParam<DeltaCase> {
 protected:
  DeltaData<double> data_{GetParam()};

  // Σ o·dout + Σ final_state·dfinal_state.
  double loss() {
    ref::recurrent_fwd(data_.forward());
    const auto dot = [](const std::vector<double>& x, const std::vector<double>& y) {
      double sum = 0;
      for (std::size_t i = 0; i < y.size(); ++i) sum += x[i] * y[i];
      return sum;
    };
    return dot(data_.o.values(), data_.dout.values()) + dot(data_.final_state.values(), data_.dfinal_state.values());
  }

  // The loss's derivative by every element of an input, by central differences of fourth order over steps h and 2h.
  template <int Rank>
  std::vector<double> differences(Tensor<double, Rank>& input, double h) {
    const std::vector<double> values = input.values();
    std::vector<double> slopes;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto at = [&](double x) {
        std::vector<double> moved = values;
        moved[i] = x;
        input.assign(moved);
        return loss();
      };
      const double x = values[i];
      slopes.push_back((8 * (at(x + h) - at(x - h)) - (at(x + 2 * h) - at(x - 2 * h))) / (12 * h));
    }
    input.assign(values);
    return slopes;
  }

  template <int Rank>
  void check(const char* name, const Tensor<double, Rank>& gradient, Tensor<double, Rank>& input, double size = 1) {
    if (!input.view()) return;
    const double error = distance(gradient.values(), differences(input, 5e-4 * size)).rms;
    if (!(error <= 1e-8)) ADD_FAILURE() << name << ": relative RMS error " << error;
  }
};

TEST_P(DeltaGradient, AgreesWithFiniteDifferences) {
  loss();
  ref::recurrent_bwd(data_.backward());
  check("dq", data_.dq, data_.q);
  check("dk", data_.dk, data_.k, std::min(1.0, GetParam().key_norm));
  check("derase_key", data_.derase_key, data_.erase_key, std::min(1.0, GetParam().key_norm));
  check("dv", data_.dv, data_.v);
  check("dbeta", data_.dbeta, data_.beta);
  check("dg", data_.dg, data_.g);
  check("dinitial_state", data_.dinitial_state, data_.initial_state);
}

TEST_P(DeltaGradient, ChunkwiseReferenceEqualsTheRecurrence) {
  if (GetParam().decay != Decay::none || !GetParam().cu_seqlens.empty()) {
    GTEST_SKIP() << "the paper's chunk algorithm has no decay and one sequence a batch entry";
  }
  loss();
  DeltaData<double> chunkwise(GetParam());
  for (const std::int64_t chunk : {1, 2, 3, 64}) {
    chunkwise.poison_outputs();
    chunk_fwd(chunkwise.forward(), chunk);
    EXPECT_LE(distance(chunkwise.o.values(), data_.o.values()).rms, 1e-13) << chunk;
    EXPECT_LE(distance(chunkwise.final_state.values(), data_.final_state.values()).rms, 1e-13) << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, DeltaGradient, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace efla::test
