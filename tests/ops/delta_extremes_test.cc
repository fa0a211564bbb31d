// The operator at the ends of float32's range: keys so long that 1/λ² underflows, step sizes whose square overflows,
// and what lies beyond (docs/numerics.md, "Range"). Every implementation and SIMD target against the float64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/delta_case.h"
#include "tests/support/delta_run.h"

namespace efla::test {
namespace {

struct Extreme {
  const char* step;
  double key_norm, beta;  // the largest ‖k‖ and β
  bool initial_state;
};

std::string name_of(const Extreme& extreme) {
  std::ostringstream text;
  text << extreme.step << " |k| " << extreme.key_norm << " beta " << extreme.beta
       << (extreme.initial_state ? " with" : " without") << " an initial state";
  return text.str();
}

// Two chunks, the second of them not full.
DeltaCase case_of(const Extreme& extreme) {
  DeltaCase c;
  c.step = extreme.step;
  c.tokens = 40;
  c.key_dim = 32;
  c.value_dim = 16;
  c.key_norm = extreme.key_norm;
  c.initial_state = extreme.initial_state;
  c.final_state = c.dfinal_state = true;
  return c;
}

template <class T>
DeltaData<T> data_of(const Extreme& extreme) {
  DeltaData<T> data(case_of(extreme));
  std::vector<double> beta = data.beta.values();
  for (double& x : beta) x *= extreme.beta;
  data.beta.assign(beta);
  return data;
}

void expect_near(const Results& got, const Results& expected, double allowed, const std::string& where) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i].second, expected[i].second).rms, allowed) << got[i].first << ' ' << where;
  }
}

// The chunk algorithm is compared for keys of up to chunk_norm, with AMX of up to amx_norm.
template <class T>
void expect_right(const Extreme& extreme, double chunk_norm = 1e18, double amx_norm = 1e15) {
  const double allowed = std::is_same_v<T, float> ? 5e-6 : 3e-3;
  ThreadPool pool(1);
  DeltaData<T> data = data_of<T>(extreme);
  DeltaData<double> exact(case_of(extreme), data);
  run_forward("ref", exact, pool);
  run_backward("ref", exact, pool);
  for (const std::string& target : cpu::supported_targets()) {
    const OnTarget guard(target);
    for (const std::string implementation : {"chunk", "recurrent", "step"}) {
      if (implementation == "chunk" && extreme.key_norm > (target == "AMX" ? amx_norm : chunk_norm)) continue;
      const std::string where = name_of(extreme) + ' ' + implementation + ' ' + target;
      data.poison_outputs();
      run_forward(implementation, data, pool);
      expect_near(forward_results(data), forward_results(exact), allowed, where);
      if (implementation != "chunk") continue;
      run_backward(implementation, data, pool);
      expect_near(backward_results(data), backward_results(exact), allowed, where);
    }
  }
}

const std::vector<const char*> kBoundedSteps{"exact", "implicit_euler", "trapezoid"};

TEST(DeltaExtremes, LongKeys) {
  for (const char* step : kBoundedSteps) {
    for (const double norm : {1e9, 1e10, 1e11, 1e12, 1e15, 1e18}) {
      expect_right<float>({step, norm, 1, true});
      expect_right<bfloat16>({step, norm, 1, true});
    }
  }
}

// From nothing, keys of length ‖k‖ leave a state of 1/‖k‖. The chunk algorithm's gradients of the scores are then
// 1/‖k‖³, which float32 holds up to 1e12, and AMX with all of their digits up to 1e10.
TEST(DeltaExtremes, LongKeysThatMakeASmallState) {
  for (const char* step : kBoundedSteps) {
    for (const double norm : {1e10, 1e12, 1e13, 1e15, 1e18}) {
      expect_right<float>({step, norm, 1, false}, 1e12, 1e10);
      expect_right<bfloat16>({step, norm, 1, false}, 1e12, 1e10);
    }
  }
}

TEST(DeltaExtremes, LongSteps) {
  for (const char* step : kBoundedSteps) {
    for (const double beta : {1e15, 2e19, 1e30, 3e38}) {
      for (const double norm : {1e-8, 1e-3, 1.0, 1e4, 1e15}) {
        expect_right<float>({step, norm, beta, true});
        expect_right<bfloat16>({step, norm, beta, true});
      }
    }
  }
}

// x = βλ between 1e-4 and 1e4, where no limit of α holds.
TEST(DeltaExtremes, LongKeysWithShortSteps) {
  for (const char* step : kBoundedSteps) {
    for (const double norm : {1e11, 1e15}) {
      for (const double x : {1e-4, 1.0, 30.0, 1e4}) expect_right<float>({step, norm, x / (norm * norm), true});
    }
  }
}

// Small but normal queries, which read a state that decays and is written again. The outputs of every token are right.
TEST(DeltaExtremes, SmallQueriesOfADecayingState) {
  ThreadPool pool(1);
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    for (const double length : {1e-28, 1e-30, 1e-33, 1e-35}) {
      DeltaCase c = case_of({"exact", 1, 1, true});
      c.decay = decay;
      DeltaData<float> data(c);
      const auto multiply = [](auto& tensor, double by) {
        std::vector<double> values = tensor.values();
        for (double& x : values) x *= by;
        tensor.assign(values);
      };
      multiply(data.q, length);
      multiply(data.initial_state, 1e6);
      data.g.assign(std::vector<double>(data.g.values().size(), -0.9));
      DeltaData<double> exact(c, data);
      run_forward("ref", exact, pool);
      const std::vector<double> right = exact.o.values();
      for (const std::string& target : cpu::supported_targets()) {
        const OnTarget guard(target);
        for (const std::string implementation : {"recurrent", "step"}) {
          data.poison_outputs();
          run_forward(implementation, data, pool);
          const std::vector<double> o = data.o.values();
          for (auto t = right.begin(); t != right.end(); t += c.value_dim) {
            const auto got = o.begin() + (t - right.begin());
            EXPECT_LE(distance({got, got + c.value_dim}, {t, t + c.value_dim}).rms, 5e-6)
                << name_of(c) << ' ' << length << ' ' << implementation << ' ' << target << " token "
                << (t - right.begin()) / c.value_dim;
          }
        }
      }
    }
  }
}

// A token whose λ overflows makes its own output and the state NaN in every implementation; the tokens before keep
// their outputs.
TEST(DeltaExtremes, AnOverflowOfLambdaIsSeen) {
  constexpr std::int64_t kToken = 35;
  ThreadPool pool(1);
  for (const char* step : kBoundedSteps) {
    DeltaData<float> data = data_of<float>({step, 1, 1, true});
    run_forward("recurrent", data, pool);
    const std::vector<double> finite = data.o.values();
    std::vector<double> keys = data.k.values();
    for (std::int64_t i = kToken * 32; i < (kToken + 1) * 32; ++i) keys[i] *= 1e20;
    data.k.assign(keys);
    for (const std::string& target : cpu::supported_targets()) {
      const OnTarget guard(target);
      for (const std::string implementation : {"chunk", "recurrent", "step"}) {
        const std::string where = std::string(step) + ' ' + implementation + ' ' + target;
        data.poison_outputs();
        run_forward(implementation, data, pool);
        const std::vector<double> o = data.o.values(), state = data.final_state.values();
        const auto is_nan = [](double x) { return std::isnan(x); };
        EXPECT_TRUE(std::all_of(o.begin() + kToken * 16, o.end(), is_nan)) << where;
        EXPECT_TRUE(std::all_of(state.begin(), state.end(), is_nan)) << where;
        const std::vector<double> before(o.begin(), o.begin() + kToken * 16);
        EXPECT_LE(distance(before, {finite.begin(), finite.begin() + kToken * 16}).rms, 2e-6) << where;
      }
    }
  }
}

// With qk_l2norm a key whose squared length overflows counts as 0; with AMX its chunk's outputs are NaN.
TEST(DeltaExtremes, AKeyTooLongToBeNormalisedHasNoEffect) {
  ThreadPool pool(1);
  DeltaCase c = case_of({"exact", 1, 1, true});
  c.qk_l2norm = true;
  for (const std::string& target : cpu::supported_targets()) {
    const OnTarget guard(target);
    for (const std::string implementation : {"chunk", "recurrent", "step"}) {
      std::vector<Results> results;
      for (const double factor : {0.0, 1e20}) {
        DeltaData<float> data(c);
        std::vector<double> keys = data.k.values();
        for (std::int64_t i = 0; i < c.key_dim; ++i) keys[i] *= factor;
        data.k.assign(keys);
        run_forward(implementation, data, pool);
        results.push_back(forward_results(data));
      }
      if (implementation == "chunk" && target == "AMX") {
        EXPECT_TRUE(std::isnan(results[1].front().second.front()));
      } else {
        EXPECT_EQ(results[0], results[1]) << implementation << ' ' << target;
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
