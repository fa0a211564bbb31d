// efla info: complete, machine-readable on request, and true of this build.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

TEST(Info, TextHasALineForEachFact) {
  const auto result = run_program({"info"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  for (const char* name :
       {"version", "commit", "compiler", "cpu", "simd", "threads", "libtorch", "blas", "cuda", "gpus"}) {
    EXPECT_NE(("\n" + result.out).find(std::string("\n") + name + " "), std::string::npos) << name;
  }
}

TEST(Info, JsonIsTrueOfThisBuild) {
  const auto result = run_program({"info", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto info = nlohmann::json::parse(result.out);
  EXPECT_EQ("efla " + info.at("version").get<std::string>() + "\n", run_program({"--version"}).out);
  EXPECT_FALSE(info.at("commit").get<std::string>().empty());
  EXPECT_EQ(info.at("threads"), available_processors());
  const auto& supported = info.at("simd").at("supported");
  EXPECT_EQ(std::count(supported.begin(), supported.end(), info.at("simd").at("target")), 1) << supported;
#ifdef EFLA_TORCH
  EXPECT_TRUE(info.at("libtorch").is_string());
  EXPECT_TRUE(info.at("blas").is_string());
#else
  EXPECT_TRUE(info.at("libtorch").is_null());
  EXPECT_TRUE(info.at("blas").is_null());
  EXPECT_FALSE(info.at("cuda").get<bool>());
#endif
  EXPECT_TRUE(info.at("cuda").is_boolean());  // LibTorch's word where it is there
  ASSERT_TRUE(info.at("gpus").is_array());
  for (const auto& gpu : info.at("gpus")) EXPECT_GT(gpu.at("memory_bytes").get<double>(), 1e9) << gpu;
}

#if defined(EFLA_TORCH) && defined(__x86_64__)
TEST(Info, KernelsOfOpenBlasFitTheProcessorUnlessTheCallerNamesSome) {
  const auto info_with = [](const std::vector<std::string>& env) {
    std::vector<std::string> command{"env"};
    command.insert(command.end(), env.begin(), env.end());
    command.insert(command.end(), {EFLA_PROGRAM, "info", "--json"});
    return nlohmann::json::parse(run_command(command).out);
  };
  const auto named = info_with({"OPENBLAS_CORETYPE=Prescott"}).at("blas_core");
  if (named.is_null()) GTEST_SKIP() << "the BLAS is not OpenBLAS";
  EXPECT_EQ(named, "Prescott");
  const auto info = info_with({"-u", "OPENBLAS_CORETYPE"});
  const auto& supported = info.at("simd").at("supported");
  if (std::count(supported.begin(), supported.end(), "AVX2") == 0) GTEST_SKIP() << "a processor without AVX2";
  EXPECT_NE(info.at("blas_core"), "Prescott");
}
#endif

TEST(Info, CommitIsTheCheckouts) {
  const auto git = run_command({"git", "-C", EFLA_SOURCE_DIR, "rev-parse", "HEAD"});
  if (git.exit_code != 0) GTEST_SKIP() << "no git checkout";
  const auto info = nlohmann::json::parse(run_program({"info", "--json"}).out);
  const auto commit = info.at("commit").get<std::string>();
  EXPECT_TRUE(git.out.starts_with(commit.substr(0, 12)) || commit.find("-g") != std::string::npos) << commit;
}

}  // namespace
}  // namespace efla::test
