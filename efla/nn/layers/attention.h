// Causal softmax attention with rotary positions: the baseline that the delta rule is compared with, and a layer of
// hybrids. Parameter names and shapes are those of flash-linear-attention's Attention.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "efla/nn/layers/parameters.h"

namespace efla::nn {

struct AttentionConfig {
  std::int64_t hidden = 64;          // width D of input and output
  std::int64_t heads = 1;            // H, of hidden / heads each, an even number
  std::int64_t key_value_heads = 1;  // a divisor of heads: query head h uses h / (heads / key_value_heads)
  double rope_theta = 10000.0;       // base of the rotation's wavelengths
};

// Throws Error, naming the field.
void validate(const AttentionConfig& config);

// The keys and values of the tokens so far.
class KeyValueCache {
 public:
  KeyValueCache(std::int64_t batch, std::int64_t key_value_heads, std::int64_t dim);

  std::int64_t tokens() const { return tokens_; }
  torch::Tensor keys() const { return keys_.narrow(2, 0, tokens_); }  // [B, HKV, tokens, D/H], rotated
  torch::Tensor values() const { return values_.narrow(2, 0, tokens_); }

  // keys, values [B, HKV, T, D/H]. Room is doubled when it runs out.
  void append(const torch::Tensor& keys, const torch::Tensor& values);

 private:
  std::int64_t tokens_ = 0;
  torch::Tensor keys_, values_;  // [B, HKV, room, D/H]
};

// o_proj(softmax(R(q) R(k)ᵀ / √(D/H)) v) over the tokens up to each, with R the rotation of Su et al., "RoFormer:
// enhanced transformer with rotary position embedding", 2021, of element i with i + D/(2H).
class Attention : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  Attention(const AttentionConfig& config, const Initialiser& init);

  // x [B, T, D] → [B, T, D], without the residual. cu_seqlens as Mixer's; positions count from each sequence's first
  // token. May be called by several threads at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;

  // The same for tokens after those in the cache, which goes on to include them. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, KeyValueCache& cache) const;

  // The cache before the first token of each of B sequences.
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
