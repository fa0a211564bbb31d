// The program efla. Loading LibTorch takes long, so commands that do not need it run here. For all else efla-torch,
// which has every command, takes the place of this program, and efla-bench for measurements.
#include "cli/commands.h"
#include "cli/support/limits.h"
#include "cli/support/program.h"

#ifdef EFLA_TORCH
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace efla::cli {
namespace {

constexpr std::array<std::string_view, 3> kWithoutTorch{"apply", "data", "report"};

// Returns the path of another program, given relative to the folder of this program.
std::string beside(const char* path) {
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  return (self.parent_path() / path).lexically_normal().string();
}

// Names kernels for OpenBLAS to use, unless the caller has named some: a release that is older than the processor takes
// kernels for processors of 2004. OpenBLAS reads the variable when it is loaded, and other BLASes ignore it.
void name_blas_kernels() {
#ifdef __x86_64__
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 || avx2) setenv("OPENBLAS_CORETYPE", avx512 ? "SkylakeX" : "Haswell", /*overwrite=*/0);
#endif
}

// Runs another program in place of this one.
int become(const std::string& program, char** argv) {
  if (const auto lacking = lacking_for_libtorch(); !lacking.empty()) return report(kFailure, lacking);
  name_blas_kernels();
  execv(program.c_str(), argv);
  return report(kFailure, "cannot run " + program + ", a part of this program: " + std::strerror(errno));
}

}  // namespace
}  // namespace efla::cli

int main(int argc, char** argv) {
  using namespace efla::cli;
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (std::find(kWithoutTorch.begin(), kWithoutTorch.end(), command) != kWithoutTorch.end()) {
    return run_efla(argc, argv, {add_apply, add_data, add_report});
  }
#ifdef EFLA_BENCH
  if (command == "bench") {
    auto program = beside("efla-bench");
    argv[1] = program.data();
    return become(program, argv + 1);
  }
#endif
  return become(beside(EFLA_TORCH_PROGRAM), argv);
}
#else
int main(int argc, char** argv) {
  using namespace efla::cli;
  return run_efla(argc, argv, {add_info, add_apply, add_data, add_report});
}
#endif
