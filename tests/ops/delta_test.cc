// Every implementation of the operator against the float64 reference, over the test matrix (delta_cases.h), for every
// dtype and SIMD target of this machine, forward and backward. At the end the largest errors are printed, one line for
// each implementation, dtype and direction:
//
//   error <implementation> <dtype> <direction> <relative RMS error> <naive implementation's> <output> <case>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_run.h"
#include "tests/support/plain_delta.h"

namespace efla::test {
namespace {

struct WorstError {
  double error = -1, plain = 0;
  std::string output, where;
};
using Key = std::tuple<std::string, std::string, std::string>;  // implementation, dtype, direction
std::map<Key, WorstError> worst_errors;

class PrintWorstErrors : public testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [key, worst] : worst_errors) {
      const auto& [implementation, dtype, direction] = key;
      std::printf("error %-14s %-8s %-8s %.2e %.2e %s %s\n", implementation.c_str(), dtype.c_str(), direction.c_str(),
                  worst.error, worst.plain, worst.output.c_str(), worst.where.c_str());
    }
  }
};
const auto* const kPrinter = testing::AddGlobalTestEnvironment(new PrintWorstErrors);

class DeltaReference : public testing::TestWithParam<DeltaCase> {
 protected:
  ThreadPool pool_{1};
  // At least these, of tolerance_of.
  double floor_ = 0, chunk_floor_ = 0, cap_ = 0, element_cap_ = 0;
  bool adds_auto_ = false;

  void check(const Key& key, const std::string& target, const Results& got, const Results& expected,
             const Results& plain) {
    const auto& [implementation, dtype, direction] = key;
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto& [output, values] = got[i];
      const Distance error = distance(values, expected[i].second);
      Tolerance tolerance = tolerance_of(dtype);
      tolerance.floor = std::max(tolerance.floor, floor_);
      if (implementation.starts_with("chunk")) tolerance.floor = std::max(tolerance.floor, chunk_floor_);
      tolerance.cap = std::max(tolerance.cap, cap_);
      tolerance.element_cap = std::max(tolerance.element_cap, element_cap_);
      const std::string why = disagreement(values, expected[i].second, plain[i].second, tolerance);
      const auto* test = testing::UnitTest::GetInstance()->current_test_info();
      EXPECT_EQ(why, "") << implementation << ' ' << dtype << ' ' << target << ' ' << output
                         << "\nreproduce: test_delta --gtest_filter='" << test->test_suite_name() << '.' << test->name()
                         << '\'';
      auto& worst = worst_errors[key];
      if (worst.error < error.rms) {
        worst = {error.rms, distance(plain[i].second, expected[i].second).rms, output,
                 target + ' ' + name_of(GetParam())};
      }
    }
  }

  template <class T>
  void run() {
    const std::string dtype(DTypeOf<T>::name);
    const DeltaCase& c = GetParam();
    DeltaData<T> data(c), plain(c);
    DeltaData<double> exact(c, data);
    run_forward("ref", exact, pool_);
    run_backward("ref", exact, pool_);
    plain_forward(plain.forward());
    plain_backward(plain.backward(), plain.initial_state.view());
    for (const std::string& target : cpu::supported_targets()) {
      const OnTarget guard(target);
      const auto compare = [&](const std::string& implementation, const char* direction, const Results& got,
                               const Results& expected, const Results& simple) {
        check({implementation, dtype, direction}, target, got, expected, simple);
        EXPECT_TRUE(data.sentinels_intact()) << implementation << ' ' << dtype << ' ' << target;
      };
      auto rows = fast_rows(delta_forward_implementations());
      if (adds_auto_) rows.emplace_back("auto");
      for (const auto& row : rows) {
        data.poison_outputs();
        if (!run_unless_refused(row, [&] { run_forward(row, data, pool_); })) continue;
        compare(row, "forward", forward_results(data), forward_results(exact), forward_results(plain));
        if (row == "recurrent_simd") continue;  // it has a forward only
        if (!run_unless_refused(row, [&] { run_backward(row, data, pool_); })) continue;
        compare(row, "backward", backward_results(data), backward_results(exact), backward_results(plain));
      }
      if (!c.cu_seqlens.empty()) continue;
      data.poison_outputs();
      run_forward("step", data, pool_);
      compare("step", "forward", forward_results(data), forward_results(exact), forward_results(plain));
    }
  }
};

TEST_P(DeltaReference, Float32) { run<float>(); }
TEST_P(DeltaReference, Bfloat16) { run<bfloat16>(); }

INSTANTIATE_TEST_SUITE_P(Matrix, DeltaReference, testing::ValuesIn(delta_cases()),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(TwoKeys, DeltaReference, testing::ValuesIn(two_key_cases()),
                         [](const auto& info) { return name_of(info.param); });

// The chunk algorithm sums what the tokens of a chunk wrote and erased, so where they erase nearly all, it rounds
// relative to those terms and not to the little that is left. The other algorithms keep the common tolerance, and so
// does what is chosen for these problems.
class DeltaReferenceErasing : public DeltaReference {
 protected:
  DeltaReferenceErasing() {
    chunk_floor_ = 1e-5;
    adds_auto_ = true;
  }
};

TEST_P(DeltaReferenceErasing, Float32) { run<float>(); }
TEST_P(DeltaReferenceErasing, Bfloat16) { run<bfloat16>(); }

INSTANTIATE_TEST_SUITE_P(Matrix, DeltaReferenceErasing, testing::ValuesIn(erasing_cases()),
                         [](const auto& info) { return name_of(info.param); });

// Of the state that is left where all was erased every algorithm has lost digits, the naive implementation too: the
// common rule of twice its error holds, but not the caps.
class DeltaReferenceFading : public DeltaReference {
 protected:
  DeltaReferenceFading() {
    floor_ = 1e-6;
    cap_ = 1e-2;
    element_cap_ = 1e-1;
    adds_auto_ = true;
  }
};

TEST_P(DeltaReferenceFading, Float32) { run<float>(); }
TEST_P(DeltaReferenceFading, Bfloat16) { run<bfloat16>(); }

INSTANTIATE_TEST_SUITE_P(Matrix, DeltaReferenceFading, testing::ValuesIn(fading_cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace efla::test
