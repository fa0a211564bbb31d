// A model's parameters one after another in one buffer, and AdamW over a range of it.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/nn/named_tensor.h"

namespace efla::train {

// [begin, end) of a flat buffer.
struct Range {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const { return end - begin; }
};

class FlatParameters {
 public:
  struct Entry {
    std::string name;
    std::vector<std::int64_t> shape;
    Range range;
    bool decays = false;  // weight decay acts on it
  };

  // Copies float32 parameters to the device and makes each a view of values().
  FlatParameters(const nn::NamedParameters& parameters, torch::Device device);

  // Makes the parameters of a copy of the model views of values() too.
  void share(const nn::NamedParameters& copy) const;

  const std::vector<Entry>& entries() const { return entries_; }
  std::int64_t size() const { return values_.numel(); }
  const torch::Tensor& values() const { return values_; }  // [size()] float32

  // Returns an entry's range of a flat buffer [size()], in the entry's shape.
  torch::Tensor view(const torch::Tensor& flat, const Entry& entry) const;

 private:
  std::vector<Entry> entries_;
  torch::Tensor values_;
};

// Returns whether weight decay acts on a parameter: on every parameter of two or more dimensions, embeddings and
// convolutions included, except learned positions, A_log and dt_bias. Biases and the scales of norms have one
// dimension.
bool weight_decays(const std::string& name, const torch::Tensor& parameter);

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// Loshchilov and Hutter's "Decoupled weight decay regularization" (2019), algorithm 2, as PyTorch's AdamW computes it,
// for a range of a model's flat parameters: one pass over memory on the CPU.
class FlatAdamW {
 public:
  // Updates the values in `range`. `parameters` must outlive the object.
  FlatAdamW(const FlatParameters& parameters, const AdamWSettings& settings, Range range);

  const Range& range() const { return range_; }

  // Updates the parameters with gradient [parameters.size()] times `scale`. The same bits for any number of threads.
  void step(const torch::Tensor& gradient, double scale, double lr, ThreadPool& pool);

  std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }
  const torch::Tensor& exp_avg() const { return exp_avg_; }        // [range().size()]
  const torch::Tensor& exp_avg_sq() const { return exp_avg_sq_; }  // [range().size()]

 private:
  struct Stretch {
    Range range;  // of the flat buffer
    bool decays;
  };
  // Views of the stretches that decay, or of those that do not.
  struct Views {
    std::vector<torch::Tensor> values, gradients, exp_avg, exp_avg_sq;
  };
  struct Factors {
    float gradient, decay, keep1, add1, keep2, add2, step, correction2, eps;
  };

  void step_on_cpu(const torch::Tensor& gradient, const Factors& decaying, const Factors& plain, ThreadPool& pool);
  void step_on_device(const torch::Tensor& gradient, double scale, double lr);  // overwrites the gradient
  Views views(const torch::Tensor& gradient, bool decay) const;

  const FlatParameters& parameters_;
  AdamWSettings settings_;
  Range range_;
  std::vector<Stretch> stretches_;  // neighbouring parameters that all decay or all do not
  std::vector<Stretch> blocks_;     // the same, cut into tasks
  torch::Tensor exp_avg_, exp_avg_sq_;
  torch::Tensor gradient_;  // the gradient of the views below
  Views decaying_, plain_;  // on a GPU, made once, because runs side by side would wait for one another to allocate
  std::int64_t steps_ = 0;
};

// Returns Σ x² over a range of a flat float32 buffer, a float64 scalar on its device, without waiting for a GPU. The
// same bits for any number of threads.
torch::Tensor sum_of_squares(const torch::Tensor& flat, Range range, ThreadPool& pool);

}  // namespace efla::train
