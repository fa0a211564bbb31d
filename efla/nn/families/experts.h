// The MLPs of a model of a family on the CPU, and mixtures of experts, of which each token goes through a few.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"

namespace efla::nn {

// Returns matrices as one weight, and lets the system take the memory of those that are copied to another type.
PackedWeight packed(std::span<const StoredMatrix> matrices, WeightType type);

// The memory of calls, which layers share.
struct MlpRows {
  RowBuffer inner, product;                         // of an MLP
  RowBuffer scores, gates, shared, picked, output;  // of a mixture of experts
};

// SwiGLU: down(silu(gate x) ⊙ up x).
class RowsMlp {
 public:
  RowsMlp() = default;
  RowsMlp(const MlpTensors& tensors, WeightType weights);

  std::size_t bytes() const { return gate_up_.bytes() + down_.bytes(); }
  // Maps the rows x [R, D] to y [R, D], which may be x.
  void apply(const View<const float, 2>& x, const View<float, 2>& y, MlpRows& rows, ThreadPool& pool) const;

 private:
  PackedWeight gate_up_, down_;
};

// A mixture of experts with a shared one:
//
//   p = softmax(router x) over all experts;  w_e = p_e of the k largest, divided by their sum if normalised
//   y = Σ_e w_e · expert_e(x) + σ(shared_gate x) · shared(x)
//
// The sum is in the order of the experts, and of equal p_e the first are taken, so that a row of y has the same bits
// for any other rows.
class Experts {
 public:
  Experts(const ExpertTensors& tensors, const ExpertsConfig& config, WeightType weights);

  std::size_t bytes() const;
  // Replaces the rows x [R, D] by y.
  void apply(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const;

 private:
  // A row of x that goes through an expert.
  struct Use {
    std::int64_t row;
    float weight;
  };
  std::vector<std::vector<Use>> route(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const;

  ExpertsConfig config_;
  PackedWeight router_, shared_gate_;
  RowsMlp shared_;
  std::vector<RowsMlp> experts_;
};

// The MLP or the mixture of experts of a layer.
class LayerMlp {
 public:
  LayerMlp(const LayerTensors& tensors, const ExpertsConfig& config, WeightType weights);

  std::size_t bytes() const { return experts_ ? experts_->bytes() : mlp_.bytes(); }
  // Replaces the rows x [R, D] by the outputs.
  void apply(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const;

 private:
  RowsMlp mlp_;
  std::optional<Experts> experts_;
};

}  // namespace efla::nn
