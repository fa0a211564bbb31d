// Causal softmax attention with rotary positions (EFLA, equation 1): the baseline for the delta rule, and a layer of
// hybrid models. Parameters have the names and shapes of flash-linear-attention's Attention.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "efla/nn/layers/parameters.h"

namespace efla::nn {

struct AttentionConfig {
  std::int64_t hidden = 64;          // width D of input and output
  std::int64_t heads = 1;            // H; hidden / heads must be even
  std::int64_t key_value_heads = 1;  // HKV, a divisor of heads: query head h uses h / (heads / key_value_heads)
  double rope_theta = 10000.0;       // base of the rotation's wavelengths
};

// Throws Error that names the field.
void validate(const AttentionConfig& config);

// The keys and values of the tokens so far.
class KeyValueCache {
 public:
  KeyValueCache(std::int64_t batch, std::int64_t key_value_heads, std::int64_t dim, torch::Device device);

  std::int64_t tokens() const { return tokens_; }
  torch::Tensor keys() const { return keys_.narrow(2, 0, tokens_); }  // [B, HKV, tokens, D/H], rotated
  torch::Tensor values() const { return values_.narrow(2, 0, tokens_); }

  // Appends keys and values [B, HKV, T, D/H]. Doubles the capacity when it is exhausted.
  void append(const torch::Tensor& keys, const torch::Tensor& values);

 private:
  std::int64_t tokens_ = 0;
  torch::Tensor keys_, values_;  // [B, HKV, capacity, D/H]
};

// Computes o_proj(softmax(R(q) R(k)ᵀ / √(D/H)) v) over the tokens up to each token. R is the rotation of Su et al.,
// "RoFormer: enhanced transformer with rotary position embedding", 2021, which pairs element i with element i + D/(2H).
class Attention : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  Attention(const AttentionConfig& config, const Initialiser& init);

  // Maps x [B, T, D] to [B, T, D], without the residual. cu_seqlens is as in Mixer; positions start at 0 in each
  // sequence. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;

  // Does the same for tokens that follow those in the cache, and appends them to the cache. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, KeyValueCache& cache) const;

  // Returns an empty cache for B sequences.
  KeyValueCache initial_cache(std::int64_t batch) const;

 private:
  struct Heads {
    torch::Tensor q;     // [B, H, T, D/H], rotated
    torch::Tensor k, v;  // [B, HKV, T, D/H], k rotated
  };
  Heads heads_of(const torch::Tensor& x, const torch::Tensor& positions) const;  // positions [T] int64
  torch::Tensor output(const torch::Tensor& o) const;                            // [B, H, T, D/H] → [B, T, D]

  AttentionConfig config_;
  std::shared_ptr<Weight> q_proj_, k_proj_, v_proj_, o_proj_;
};

}  // namespace efla::nn
