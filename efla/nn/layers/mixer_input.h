// The part of a mixer before its recurrence: the product with the projections of q, k, v and the gates, the short
// convolution, and the activations.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// Which rows the convolution of packed sequences reads that follow tokens in states: each sequence has a window, which
// is the last inputs in its state and then its own inputs. The same for all mixers with one number of taps.
struct PackedWindows {
  // cu_seqlens [N + 1] int64: 0 and the ends of the sequences; tokens: T, of all sequences together; conv: W, the taps,
  // or 0 without a convolution.
  PackedWindows(torch::Tensor cu_seqlens, std::int64_t tokens, std::int64_t conv);

  torch::Tensor cu_seqlens;
  // int64, undefined without a convolution. A source is a row of the last inputs in all states, N·(W − 1) rows,
  // followed by the T inputs.
  torch::Tensor sources;  // [N·(W − 1) + T], the source of each row of the windows, one window after the other
  torch::Tensor ends;     // [N + 1], 0 and the ends of the windows
  torch::Tensor outputs;  // [T], the row of each token
  torch::Tensor last;     // [N·(W − 1)], the rows that the next states have
};

// Begins the constructor of a mixer: plans it and registers its first parameters, q_proj, k_proj and v_proj. Throws
// Error for a configuration that validate refuses, and for a preset whose flag softmax differs.
SharedPlan begin_mixer(const MixerConfig& config, bool softmax, torch::nn::Module& mixer, const Initialiser& init);

// The projections of MixerPlan::joint().
class JointProjection {
 public:
  // Takes the weights from the parameters of a mixer, which has registered all of them.
  JointProjection(const MixerPlan& plan, const torch::nn::Module& mixer);

  // Returns the outputs for x [B, T, D] side by side, [B, T, ·], and on a GPU perhaps further columns.
  torch::Tensor operator()(const torch::Tensor& x) const;
  // Returns the same by one product per projection. For one token this moves less data, because the weights are not
  // concatenated.
  torch::Tensor one_by_one(const torch::Tensor& x) const;
  // Returns the type and the device of the weights.
  torch::TensorOptions options() const { return weights_[0].options(); }

 private:
  std::vector<torch::Tensor> weights_;  // [·, D]
};

// The short convolution of q, k and v, if the plan has one, and their activations and norms by sums.
class QkvConvolution {
 public:
  // Registers q_conv1d, k_conv1d and v_conv1d [channels, 1, W] in the mixer.
  QkvConvolution(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init);

  // Returns the first columns of `projected` [B, T, ·] after convolution and activation, [B, T, channels], and the
  // remaining columns. With cu_seqlens [N + 1] B is 1.
  std::pair<torch::Tensor, torch::Tensor> operator()(const torch::Tensor& projected,
                                                     const torch::Tensor& cu_seqlens) const;
  // Splits the result by heads: q [B, T, H, K], k [B, T·n, H, K], v [B, T·n, HV, V].
  std::array<torch::Tensor, 3> heads_of(const torch::Tensor& qkv) const;
  // Returns whether the convolution reads cu_seqlens on the CPU.
  bool reads_cu_seqlens() const { return plan_->config.conv > 0 && plan_->config.qk_activation != "silu"; }

 private:
  torch::Tensor taps() const;                                // [channels, 1, W]
  torch::Tensor activated(const torch::Tensor& qkv) const;   // applies the activations to the sums of the convolution
  torch::Tensor sum_normed(const torch::Tensor& qkv) const;  // divides q and k by their absolute sums

  SharedPlan plan_;
  std::shared_ptr<Weight> q_, k_, v_;
};

}  // namespace efla::nn
