#include "cli/support/device.h"

#include <fmt/format.h>
#include <torch/cuda.h>

#include "cli/support/print.h"
#include "efla/base/error.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/gguf_config.h"
#include "efla/ops/gpu.h"
#include "efla/torch/context.h"

namespace efla::cli {
namespace {

// Returns why no GPU can be used, or "".
std::string absence() {
  if (!libtorch::has_gpu_kernels()) return "this build has no GPU kernels for models";
  if (const Gpus gpus = find_gpus(); gpus.found.empty()) return gpus.absence;
  return torch::cuda::is_available() ? "" : "this LibTorch finds no GPU that it can use";
}

}  // namespace

void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "Where to compute: cpu, cuda, or auto, which is a GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

torch::Device choose_device(const std::string& command, const std::string& device, int local_rank) {
  if (device == "cpu") return torch::kCPU;
  const std::string why = absence();
  if (device == "auto" && !why.empty()) return torch::kCPU;
  if (!why.empty()) throw Error(command, "--device", "cuda", "cpu, because " + why);
  const auto gpus = find_gpus().found;
  if (local_rank >= std::ssize(gpus)) {
    throw Error(command, "--device", fmt::format("cuda:{}, by the process's local rank", local_rank),
                fmt::format("at most {} processes per machine, one per GPU", gpus.size()));
  }
  libtorch::compute_reproducibly();  // before there are other threads, because it sets a variable of the environment
  print_or_drop(stderr, fmt::format("device: cuda:{}, {}\n", local_rank, gpus[local_rank].name));
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

torch::Device choose_model_device(const std::string& command, const std::string& device,
                                  const std::filesystem::path& model) {
  constexpr int kHopper = 9;  // of the compute capability, for the kernels of decode steps
  if (nn::is_gguf(model)) {
    if (device == "cuda") throw Error(command, "--device", "cuda for a GGUF file", "cpu");
    return torch::kCPU;
  }
  const auto gpus = find_gpus().found;
  const bool has_experts = nn::is_family_folder(model) && nn::load_family_config(model).experts.count > 0;
  if (has_experts && device == "auto") return torch::kCPU;
  if (!nn::is_family_folder(model) || device == "cpu" || gpus.empty() || gpus.front().major == kHopper) {
    return choose_device(command, device);
  }
  if (device == "auto") return torch::kCPU;
  throw Error(command, "--device", "cuda, a " + gpus.front().name,
              "cpu, or a Hopper GPU for a hybrid model from Hugging Face");
}

}  // namespace efla::cli
