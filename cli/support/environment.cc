#include "cli/support/environment.h"

#include <fstream>
#include <iterator>
#include <string>

#include "efla/base/shell_word.h"
#include "efla/base/threads.h"
#include "efla/base/version.h"
#include "efla/cpu/common/target.h"
#include "efla/ops/gpu.h"

#ifdef EFLA_TORCH
#include <dlfcn.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <filesystem>
#endif

namespace efla::cli {
namespace {

std::string compiler() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#else
  return std::string("gcc ") + __VERSION__;
#endif
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

nlohmann::ordered_json gpus() {
  auto all = nlohmann::ordered_json::array();
  for (const auto& gpu : find_gpus().found) {
    all.push_back({{"name", gpu.name},
                   {"memory_bytes", gpu.memory_bytes},
                   {"compute_capability", std::to_string(gpu.major) + "." + std::to_string(gpu.minor)}});
  }
  return all;
}

#ifdef EFLA_TORCH
// Returns the file of the BLAS, which the system chooses when it loads LibTorch.
nlohmann::ordered_json blas_library() {
  Dl_info info;
  void* symbol = dlsym(RTLD_DEFAULT, "sgemm_");
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return "inside LibTorch";
  std::error_code failed;
  const auto path = std::filesystem::canonical(info.dli_fname, failed);
  return failed ? std::string(info.dli_fname) : path.string();
}

// Returns the name of the kernels that OpenBLAS has chosen; null for another BLAS.
nlohmann::ordered_json blas_core() {
  using CoreName = char* (*)();
  const auto core_name = reinterpret_cast<CoreName>(dlsym(RTLD_DEFAULT, "openblas_get_corename"));
  return core_name != nullptr ? nlohmann::ordered_json(core_name()) : nlohmann::ordered_json();
}
#endif

}  // namespace

nlohmann::ordered_json environment() {
  nlohmann::ordered_json all;
  all["version"] = version();
  all["commit"] = commit();
  all["compiler"] = compiler();
  all["build_type"] = EFLA_BUILD_TYPE;
  all["cpu"] = cpu_model();
  all["simd"] = {{"target", cpu::target_name()}, {"supported", cpu::supported_targets()}};
  all["threads"] = available_processors();
#ifdef EFLA_TORCH
  all["libtorch"] = TORCH_VERSION;
  all["blas"] = blas_library();
  all["blas_core"] = blas_core();
  all["cuda"] = torch::cuda::is_available();
#else
  all["libtorch"] = nullptr;
  all["blas"] = nullptr;
  all["blas_core"] = nullptr;
  all["cuda"] = false;
#endif
  all["gpus"] = gpus();
  return all;
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string words((std::istreambuf_iterator<char>(file)), {});
  std::string line;
  for (std::size_t at = 0; at < words.size(); at = words.find('\0', at) + 1) {
    line += (line.empty() ? "" : " ") + shell_word(words.c_str() + at);
    if (words.find('\0', at) == std::string::npos) break;
  }
  return line;
}

}  // namespace efla::cli
