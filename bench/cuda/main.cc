// The program efla-bench-cuda: `efla-bench op --device cuda` for machines without LibTorch. It needs only the CUDA
// runtime, which is linked in.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "bench/cuda/suite.h"
#include "efla/base/error.h"
#include "efla/base/version.h"
#include "efla/cuda/device.h"

namespace {

constexpr int kFailed = 1, kBadInput = 2;

int report(int code, const std::string& message) {
  std::fprintf(stderr, "efla-bench-cuda: %s\n", message.c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App program("Times the delta rule's kernels on a GPU; one JSON object per result.", "efla-bench-cuda");
  efla::bench::cuda::GpuOptions options;
  options.commit = efla::commit();
  program
      .add_option("--filter", options.filter,
                  "Only cases whose name contains this text, such as forward/gdn/d128 or decode/efla")
      ->capture_default_str();
  program.add_option("--reps", options.repeats, "Graph replays, and calls outside of a graph, per case")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  program.add_flag("--scaling", options.scaling, "Measure T from 1024 to 262144 instead");
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : kBadInput;
  }
  std::string absence;
  const auto devices = efla::gpu::find_devices(absence);
  if (devices.empty()) return report(kBadInput, "got a machine without a GPU, expected one with a GPU: " + absence);
  options.gpu = devices.front().name;
  efla::bench::cuda::time_gpu(options, [](const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  });
  return 0;
} catch (const efla::Error& error) {
  return report(kBadInput, error.what());
} catch (const std::exception& error) {
  return report(kFailed, error.what());
}
