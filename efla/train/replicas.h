// Copies of one language model that share their parameters: each computes one micro-batch at a time on one thread, and
// has gradients of its own.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/packed_batches.h"
#include "efla/train/flat_parameters.h"

namespace efla::train {

// Packed sequences as a model reads them.
struct LmBatch {
  torch::Tensor inputs, targets;  // [1, N] int64
  torch::Tensor cu_seqlens;       // [sequences + 1] int64, on the CPU
  std::int64_t counted = 0;       // targets that are not kNoTarget
  std::int64_t tokens = 0;        // inputs that are tokens
};

LmBatch make_batch(const data::PackedBatch& batch, torch::Device device);

// What training needs of a language model.
struct LmReplica {
  NamedParameters parameters;  // float32 leaves, in a fixed order
  // Mean cross-entropy over the targets that count, a scalar with its graph.
  std::function<torch::Tensor(const LmBatch&)> loss;
};

class Replicas {
 public:
  // As many replicas as are made by calling `make` once for each; precision as LmTrainOptions has it. All take the
  // values of the first one's parameters. Throws Error where the device or the precision is not to be had.
  Replicas(int count, const std::function<LmReplica()>& make, torch::Device device, const std::string& precision,
           ThreadPool& pool);

  const FlatParameters& parameters() const { return *parameters_; }
  torch::Device device() const { return device_; }
  ThreadPool& pool() const { return pool_; }

  // Calls task(i, replica) for every i in [0, count), as many calls at a time as there are replicas and threads; each
  // call has a replica to itself. BLAS and LibTorch keep to the calling thread, so that no sum depends on the number of
  // threads.
  void run(std::int64_t count, const std::function<void(std::int64_t, const LmReplica&)>& task);

  // The loss under the precision asked for.
  torch::Tensor loss(const LmReplica& replica, const LmBatch& batch) const;

 private:
  std::vector<LmReplica> replicas_;
  std::unique_ptr<FlatParameters> parameters_;
  torch::Device device_;
  bool autocast_;
  ThreadPool& pool_;
};

}  // namespace efla::train
