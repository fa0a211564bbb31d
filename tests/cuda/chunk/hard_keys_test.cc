// The errors of the chunkwise kernels against float64 on keys that are hard for chunks, for the rules of the family;
// the yardstick is the rounding oracle, whose errors are printed too.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/launch.h"
#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/chunk_bwd_oracle.h"
#include "tests/support/chunk_oracle.h"
#include "tests/support/compare.h"
#include "tests/support/delta_results.h"
#include "tests/support/hard_keys.h"

namespace efla::test {
namespace {

struct HardCase {
  const char *rule, *keys;
  double spread;
  bool log_normal;

  DeltaCase of_rule() const {
    const std::string name = rule;
    DeltaCase c{name == "efla" ? "exact" : "euler", 1, 1, name != "efla", 1, 1024, 2, 128, 128, 1};
    c.initial_state = c.final_state = c.dfinal_state = true;
    c.decay = name == "gdn" ? Decay::scalar : name == "kda" ? Decay::channel : Decay::none;
    c.gate = 0.1;
    return c;
  }
};

std::ostream& operator<<(std::ostream& out, const HardCase& hard) { return out << hard.rule << ", " << hard.keys; }

// Prints the relative RMS error of every result.
void print(const HardCase& hard, const char* algorithm, const Results& got, const Results& expected) {
  std::printf("%s, %s, %s:", hard.rule, hard.keys, algorithm);
  for (std::size_t i = 0; i < got.size(); ++i)
    std::printf(" %s %.2e", got[i].first.c_str(), distance(got[i].second, expected[i].second).rms);
  std::printf("\n");
}

// Runs a case with inputs of type E.
template <class E>
void run_hard_case(const HardCase& hard) {
  const DeltaCase c = hard.of_rule();
  if (c.decay == Decay::channel && !gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  DeltaData<E> data(c);
  draw_cone(data, hard.spread, hard.log_normal);
  data.initial_state.assign(std::vector<double>(data.initial_state.view().size()));
  DeltaData<E> oracle = data;
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  chunk_oracle_forward(oracle.forward());
  chunk_oracle_backward(oracle.forward(), oracle.backward());
  const Results expected = all_results(exact), of_oracle = all_results(oracle);
  print(hard, "oracle", of_oracle, expected);
  const DeviceData<E> device(data);
  const SavedStatesOnDevice states(c.shape(), 4 * gpu::kChunkTokens);
  const PoisonedWorkspace forward(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule())),
      backward(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
  for (const auto& [name, kernel] : {std::pair{"portable", gpu::ChunkKernel::portable},
                                     {"sweep", gpu::ChunkKernel::sweep},
                                     {"fused", gpu::ChunkKernel::fused}}) {
    if (kernel != gpu::ChunkKernel::portable && !gpu::is_hopper()) continue;
    gpu::chunk_fwd(states.in(device.forward()), forward.get(), nullptr, kernel);
    gpu::chunk_bwd(states.in(device.backward()), backward.get(), nullptr, kernel);
    device.download();
    const Results got = all_results(data);
    print(hard, name, got, expected);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto& [result, values] = got[i];
      const std::string kind =
          (result.starts_with('d') ? "gradients of " : "") + std::string(DTypeOf<E>::name) + " by chunks";
      EXPECT_EQ(disagreement(values, expected[i].second, of_oracle[i].second, tolerance_of(kind)), "")
          << result << ' ' << name;
    }
  }
}

class CudaHardKeys : public testing::TestWithParam<HardCase> {};
TEST_P(CudaHardKeys, Errors) { run_hard_case<bfloat16>(GetParam()); }

class CudaHardKeysFloat16 : public testing::TestWithParam<HardCase> {};
TEST_P(CudaHardKeysFloat16, Errors) { run_hard_case<float16>(GetParam()); }

std::vector<HardCase> hard_cases(const std::vector<const char*>& rules) {
  std::vector<HardCase> cases;
  for (const char* rule : rules) {
    const bool efla = std::string(rule) == "efla";  // the other rules divide keys by their lengths
    cases.push_back({rule, "random", 1e3, false});
    if (efla) cases.push_back({rule, "log-normal norms", 1e3, true});
    cases.push_back({rule, efla ? "cone .3, log-normal norms" : "cone .3", 0.3, efla});
    cases.push_back({rule, "cone .05", 0.05, false});
  }
  return cases;
}

std::string name_of_case(const testing::TestParamInfo<HardCase>& info) {
  std::string name = std::string(info.param.rule) + "_" + info.param.keys;
  std::erase_if(name, [](char letter) { return letter == '.' || letter == ','; });
  for (char& letter : name) letter = letter == ' ' || letter == '-' ? '_' : letter;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaHardKeys, testing::ValuesIn(hard_cases({"efla", "deltanet", "gdn", "kda"})),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Rules, CudaHardKeysFloat16, testing::ValuesIn(hard_cases({"efla", "deltanet", "gdn", "kda"})),
                         name_of_case);

}  // namespace
}  // namespace efla::test
