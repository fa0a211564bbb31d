#include "bench/machine.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

#include "bench/op/ggml_delta.h"
#include "efla/base/threads.h"
#include "efla/ops/delta.h"

namespace efla::bench {
namespace {

// Returns, for example, "AuthenticAMD family 25 model 1 stepping 1", because names of virtual processors often say
// less.
std::string processor_signature() {
  std::ifstream file("/proc/cpuinfo");
  std::string signature;
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const auto colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, line.find('\t')), value = line.substr(colon + 2);
    if (name == "vendor_id") signature += value;
    if (name == "cpu family") signature += " family " + value;
    if (name == "model") signature += " model " + value;
    if (name == "stepping") signature += " stepping " + value;
  }
  return signature;
}

}  // namespace

nlohmann::ordered_json machine(nlohmann::ordered_json all, int threads) {
  const char* coretype = std::getenv("OPENBLAS_CORETYPE");
  all["processors"] = available_processors();
  all["threads"] = threads;
  all["processor_signature"] = processor_signature();
  all["openblas_coretype"] = coretype != nullptr ? nlohmann::ordered_json(coretype) : nlohmann::ordered_json();
  all["ggml"] = nullptr;
#ifdef EFLA_BENCH_GGML
  all["ggml"] = ggml_version_text();
#endif
  double load[1] = {0};
  if (getloadavg(load, 1) == 1) all["load_average"] = load[0];
  all["time"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  return all;
}

void print_machine(const nlohmann::ordered_json& machine) {
  fmt::print("{} ({}), {} processors, {} threads, kernels for {}\n", machine["cpu"].get<std::string>(),
             machine["processor_signature"].get<std::string>(), machine["processors"].dump(), machine["threads"].dump(),
             machine["simd"]["target"].get<std::string>());
  fmt::print("{}, {}, commit {}, LibTorch {}, BLAS {} (core {}, OPENBLAS_CORETYPE {}), load {}\n",
             machine["compiler"].get<std::string>(), machine["build_type"].get<std::string>(),
             machine["commit"].get<std::string>(), machine["libtorch"].get<std::string>(),
             machine["blas"].get<std::string>(), machine["blas_core"].dump(), machine["openblas_coretype"].dump(),
             machine["load_average"].dump());
  fmt::print("ggml {}\n", machine["ggml"].is_null()
                              ? "not built in: configure with -DEFLA_BENCH_GGML=PATH for it as a peer"
                              : machine["ggml"].get<std::string>());
}

void use_threads(int threads) {
  set_threads(threads);
  at::set_num_threads(threads);
  use_blas_threads(threads);
}

void use_blas_threads(int threads) {
  using SetThreads = void (*)(int);
  static const auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set != nullptr) set(threads);
}

}  // namespace efla::bench
