// Copies of one model that share their parameters and compute side by side, each on one thread with gradients of its
// own.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/torch/autocast.h"
#include "efla/train/flat_parameters.h"

namespace efla::train {

class DataParallel {
 public:
  // Calls make(), which makes one more copy of the model and returns its parameters, `copies` times. All copies take
  // the first one's values. On a GPU LibTorch then computes reproducibly (torch/context.h). precision is float32 or
  // bfloat16, of matrix products. Throws Error for a device or a precision that this machine does not have.
  DataParallel(int copies, const std::function<nn::NamedParameters()>& make, ThreadPool& pool,
               torch::Device device = torch::kCPU, const std::string& precision = "float32");

  const FlatParameters& parameters() const { return *parameters_; }
  // Returns the parameters of one copy: other leaves with the same values.
  const nn::NamedParameters& copy(int i) const { return copies_[static_cast<std::size_t>(i)]; }
  torch::Device device() const { return device_; }
  ThreadPool& pool() const { return pool_; }

  // Calls task(i, copy) for every i in [0, count) on as many threads as there are copies; no two calls at a time have
  // the same copy. BLAS and LibTorch keep to the calling thread, so that no sum depends on the number of threads.
  void run(std::int64_t count, const std::function<void(std::int64_t i, int copy)>& task) const;

  // Sets the precision of the forward passes on this thread while the object returned lives.
  std::unique_ptr<libtorch::Bfloat16OnGpu> use_precision() const;

 private:
  std::vector<nn::NamedParameters> copies_;
  std::unique_ptr<FlatParameters> parameters_;
  torch::Device device_;
  bool autocast_;
  ThreadPool& pool_;
};

}  // namespace efla::train
