#include "efla/nn/layers/softmax_mixer.h"

#include <torch/types.h>

#include <cmath>

#include "efla/base/check.h"
#include "efla/nn/layers/mixer_gates.h"

namespace efla::nn {

using torch::Tensor;

SoftmaxMixer::SoftmaxMixer(const MixerConfig& config, const Initialiser& init)
    : plan_(begin_mixer(config, /*softmax=*/true, *this, init)),
      convolution_(plan_, *this, init),
      output_(plan_, *this, init),
      projection_(*plan_, *this) {}

Tensor SoftmaxMixer::attend(const Tensor& qkv) const {
  const std::int64_t batch = qkv.size(0), tokens = qkv.size(1), heads = plan_->config.heads,
                     dim = plan_->config.key_dim;
  const auto parts = qkv.view({batch, tokens, 3, heads, dim}).permute({2, 0, 3, 1, 4});  // [3, B, H, T, D/H]
  const auto scores = torch::matmul(parts[0], parts[1].transpose(-1, -2)) / std::sqrt(static_cast<double>(dim));
  const auto future = torch::ones({tokens, tokens}, scores.options().dtype(torch::kBool)).triu(1);
  const auto weights = torch::softmax(scores.masked_fill(future, -INFINITY), -1);
  return torch::matmul(weights, parts[2]).transpose(1, 2);
}

Tensor SoftmaxMixer::forward(const Tensor& x, const Tensor& cu_seqlens) const {
  Require("mixer")(!cu_seqlens.defined() || cu_seqlens.size(0) == 2, "cu_seqlens", "packed sequences, and softmax",
                   "one sequence");
  const auto [qkv, columns] = convolution_(projection_(x), cu_seqlens);
  return output_(x, split_small_outputs(*plan_, columns).g, attend(qkv));
}

}  // namespace efla::nn
