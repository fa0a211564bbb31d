// The program efla. Loading LibTorch takes most of a second, so the commands that do without it run here, and
// efla-torch, which has them all, takes the place of this program for the others and for what concerns them all.
#include "cli/commands.h"
#include "cli/limits.h"
#include "cli/program.h"

#ifdef EFLA_TORCH
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace efla::cli {
namespace {

constexpr std::array<std::string_view, 3> kWithoutTorch{"apply", "data", "report"};

int become_efla_torch(char** argv) {
  if (const auto lacking = lacking_for_libtorch(); !lacking.empty()) return report(kFailure, lacking);
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const auto program = self.parent_path() / EFLA_TORCH_PROGRAM;
  execv(program.c_str(), argv);
  return report(kFailure, "cannot run " + program.lexically_normal().string() +
                              ", a part of this program: " + std::strerror(errno));
}

}  // namespace
}  // namespace efla::cli

int main(int argc, char** argv) {
  using namespace efla::cli;
  const bool here = argc > 1 && std::find(kWithoutTorch.begin(), kWithoutTorch.end(), argv[1]) != kWithoutTorch.end();
  return here ? run_program(argc, argv, {add_apply, add_data, add_report}) : become_efla_torch(argv);
}
#else
int main(int argc, char** argv) {
  using namespace efla::cli;
  return run_program(argc, argv, {add_info, add_apply, add_data, add_report});
}
#endif
