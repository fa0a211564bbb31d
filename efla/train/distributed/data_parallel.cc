#include "efla/train/distributed/data_parallel.h"

#include <torch/cuda.h>

#include <algorithm>
#include <atomic>

#include "efla/base/error.h"
#include "efla/torch/context.h"
#include "efla/torch/one_thread.h"

namespace efla::train {
namespace {

torch::Device usable(torch::Device device, const std::string& precision) {
  if (device.is_cuda() && !torch::cuda::is_available()) {
    throw Error("train", "device", "cuda", "cpu: this LibTorch finds no GPU that it can use");
  }
  if (precision == "bfloat16" && !device.is_cuda()) {
    throw Error("train", "training.precision", "bfloat16 on " + device.str(),
                "float32, or the device cuda: on the CPU the operators keep float32 numbers");
  }
  return device;
}

}  // namespace

DataParallel::DataParallel(int copies, const std::function<nn::NamedParameters()>& make, ThreadPool& pool,
                           torch::Device device, const std::string& precision)
    : device_(usable(device, precision)), autocast_(precision == "bfloat16"), pool_(pool) {
  if (device.is_cuda()) libtorch::compute_reproducibly();
  for (int i = 0; i < copies; ++i) copies_.push_back(make());
  parameters_ = std::make_unique<FlatParameters>(copies_.front(), device);
  for (const auto& copy : copies_) parameters_->share(copy);
}

void DataParallel::run(std::int64_t count, const std::function<void(std::int64_t i, int copy)>& task) const {
  std::atomic<std::int64_t> next = 0;
  pool_.run(std::min(count, static_cast<std::int64_t>(copies_.size())), [&](std::int64_t copy, int) {
    libtorch::compute_on_this_thread_only();
    try {
      for (std::int64_t i = next++; i < count; i = next++) task(i, static_cast<int>(copy));
    } catch (...) {
      next = count;
      throw;
    }
  });
}

std::unique_ptr<libtorch::Bfloat16OnGpu> DataParallel::use_precision() const {
  return autocast_ ? std::make_unique<libtorch::Bfloat16OnGpu>() : nullptr;
}

}  // namespace efla::train
