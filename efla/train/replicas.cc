#include "efla/train/replicas.h"

#include <ATen/autocast_mode.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>

#include "efla/autograd/one_thread.h"
#include "efla/base/error.h"

namespace efla::train {
namespace {

// Runs matrix products of float32 parameters in bfloat16 on the GPU, while the object lives, on this thread.
class Bfloat16OnGpu {
 public:
  Bfloat16OnGpu() { set(true); }
  ~Bfloat16OnGpu() {
    at::autocast::clear_cache();
    set(false);
  }
  Bfloat16OnGpu(const Bfloat16OnGpu&) = delete;
  Bfloat16OnGpu& operator=(const Bfloat16OnGpu&) = delete;

 private:
  static void set(bool enabled) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, enabled);
#else
    at::autocast::set_autocast_gpu_dtype(at::kBFloat16);
    at::autocast::set_enabled(enabled);
#endif
  }
};

torch::Device usable(torch::Device device, const std::string& precision) {
  if (device.is_cuda() && !torch::cuda::is_available()) {
    throw Error("train lm", "--device", "cuda", "cpu: this LibTorch finds no GPU that it can use");
  }
  if (precision == "bfloat16" && !device.is_cuda()) {
    throw Error("train lm", "training.precision", "bfloat16 on " + device.str(),
                "float32, or --device cuda: on the CPU the operators keep float32 numbers");
  }
  return device;
}

}  // namespace

LmBatch make_batch(const data::PackedBatch& batch, torch::Device device) {
  const auto tensor = [](const std::vector<std::int64_t>& values) {
    return torch::tensor(at::ArrayRef<std::int64_t>(values), torch::kInt64);
  };
  const auto counted = std::count_if(batch.targets.begin(), batch.targets.end(),
                                     [](std::int64_t target) { return target != data::kNoTarget; });
  return {tensor(batch.inputs).unsqueeze(0).to(device), tensor(batch.targets).unsqueeze(0).to(device),
          tensor(batch.cu_seqlens), counted, batch.tokens};
}

Replicas::Replicas(int count, const std::function<LmReplica()>& make, torch::Device device,
                   const std::string& precision, ThreadPool& pool)
    : device_(usable(device, precision)), autocast_(precision == "bfloat16"), pool_(pool) {
  for (int i = 0; i < count; ++i) replicas_.push_back(make());
  parameters_ = std::make_unique<FlatParameters>(replicas_.front().parameters, device);
  for (const auto& replica : replicas_) parameters_->share(replica.parameters);
}

void Replicas::run(std::int64_t count, const std::function<void(std::int64_t, const LmReplica&)>& task) {
  std::atomic<std::int64_t> next = 0;
  pool_.run(std::min(count, static_cast<std::int64_t>(replicas_.size())), [&](std::int64_t replica, int) {
    autograd::compute_on_this_thread_only();
    try {
      for (std::int64_t i = next++; i < count; i = next++) task(i, replicas_[replica]);
    } catch (...) {
      next = count;
      throw;
    }
  });
}

torch::Tensor Replicas::loss(const LmReplica& replica, const LmBatch& batch) const {
  if (!autocast_) return replica.loss(batch);
  const Bfloat16OnGpu autocast;
  return replica.loss(batch);
}

}  // namespace efla::train
