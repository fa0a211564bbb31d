// The gradient of a step, summed over parts that are computed side by side, and ready bucket by bucket while the
// backward passes still run.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "efla/train/flat_parameters.h"

namespace efla::train {

// Each parameter's gradients are added in the order of the parts, whichever thread comes first, so the sum has
// the same bits for any number of threads. Gradients that come early wait, at most one per thread.
class GradientSum {
 public:
  // buckets: ranges that cover the flat gradient, in the order in which `ready` is called for them. ready(bucket) is
  // called, once per step and one at a time, when all parameters in it are complete and the buckets before it were
  // ready.
  GradientSum(const FlatParameters& parameters, std::vector<Range> buckets, std::function<void(std::size_t)> ready);

  // Starts a step of `parts` parts.
  void begin(std::int64_t parts);

  // Adds the gradient of one parameter (its index among the entries) in one part; an undefined tensor is zero.
  // Exactly once per step for every pair; may be called from several threads.
  void add(std::size_t parameter, std::int64_t part, torch::Tensor gradient);

  // Adds gradients of one part, by parameter, in few kernels on a GPU; undefined tensors are zero. Replaces begin and
  // add, after the caller has set gradient() to zero. Called by one thread at a time.
  void add_at_once(const std::vector<torch::Tensor>& gradients) const;

  // [parameters.size()] float32
  const torch::Tensor& gradient() const { return gradient_; }

 private:
  struct Parameter {
    std::mutex mutex;
    std::map<std::int64_t, torch::Tensor> waiting;  // by part
    std::int64_t next = 0;                          // the first part that is not in the sum
    bool written = false;
    std::size_t first_bucket = 0, last_bucket = 0;
  };

  void accumulate(std::size_t parameter, const torch::Tensor& gradient);
  void complete(const Parameter& parameter);

  const FlatParameters& parameters_;
  std::vector<Range> buckets_;
  std::function<void(std::size_t)> ready_;
  torch::Tensor gradient_;
  std::vector<Parameter> sums_;
  std::int64_t parts_ = 0;
  std::mutex bucket_mutex_;
  std::vector<std::size_t> missing_;  // parameters of each bucket that are not complete
  std::size_t next_bucket_ = 0;
};

// Returns the ranges between the owners' boundaries (rising; the first is 0, the last the size), cut to at most
// `longest` floats. The last range comes first because a backward pass completes it first.
std::vector<Range> gradient_buckets(const std::vector<std::int64_t>& boundaries, std::int64_t longest);

}  // namespace efla::train
