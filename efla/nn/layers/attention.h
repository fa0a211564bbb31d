// Causal softmax attention with rotary positions (EFLA, equation 1): the baseline for the delta rule, and a layer of
// hybrid models. Parameters have the names and shapes of flash-linear-attention's Attention.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

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

  // Appends keys and values [B, HKV, T, D/H].
  void append(const torch::Tensor& keys, const torch::Tensor& values);

  // Makes room for more tokens. At least doubles the capacity when it is exhausted, which replaces the tensors.
  void reserve(std::int64_t tokens);
  // All slots [B, HKV, capacity, D/H]. Token t has slot t; slots without a token have finite numbers.
  const torch::Tensor& key_slots() const { return keys_; }
  const torch::Tensor& value_slots() const { return values_; }
  // Counts a token that attend_one has written.
  void count_token() { ++tokens_; }

  // Return independent caches: the sequences of all given caches one after the other, with their last tokens in the
  // same slot, and the sequences of the given rows [·] int64. Slots before a sequence's first token have zeros.
  static KeyValueCache joined(const std::vector<const KeyValueCache*>& caches);
  KeyValueCache selected(const torch::Tensor& rows) const;

 private:
  std::int64_t tokens_ = 0;
  torch::Tensor keys_, values_;
};

// Returns the softmax attention [B, H, T, E] of q [B, H, T, E] to k and v [B, HKV, S, E], S ≥ T. q belongs to the last
// T of S tokens. On a GPU LibTorch's fused kernels compute it where S = T, T = 1 or E is a multiple of 8 up to 256.
torch::Tensor causal_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);

// The rotation of queries and keys with E = D/H elements by the positions of tokens.
class Rotation {
 public:
  // positions [..., T] are on the device of the queries and keys, whose type is `dtype`.
  Rotation(const torch::Tensor& positions, std::int64_t dim, double theta, torch::ScalarType dtype);

  // Rotates x [..., T, E].
  torch::Tensor operator()(const torch::Tensor& x) const;

 private:
  torch::Tensor cos_, sin_;  // [..., T, E]; the first half of sin_ has the other sign
};

// What all layers need to attend from one token per sequence.
struct AttentionStep {
  // slot [1] int64: the slot of the tokens in caches of this capacity, on their device. starts [B] int64: the slots of
  // the sequences' first tokens; undefined: zeros.
  AttentionStep(const AttentionConfig& config, const torch::Tensor& slot, const torch::Tensor& starts,
                std::int64_t capacity);

  torch::Tensor slot;
  Rotation rotated;
  torch::Tensor mask;  // [1 or B·HKV, 1, capacity], added to scores: 0, or −∞ for slots without a token
};

// Computes the attention of one token per sequence, whose projections qkv [B, (H + 2·HKV)·D/H] are in float32: softmax(
// R(q) R(k)ᵀ / √(D/H)) v [B, D], where k and v include the token. Writes its keys and values to the cache, but does not
// count them. Launches the same kernels for every slot, so that a CUDA graph can be replayed for the next token.
torch::Tensor attend_one(const AttentionConfig& config, const AttentionStep& step, const torch::Tensor& qkv,
                         const KeyValueCache& cache);

// Computes o_proj(softmax(R(q) R(k)ᵀ / √(D/H)) v) over the tokens up to each token. R is the rotation of Su et al.,
// "RoFormer: enhanced transformer with rotary position embedding", 2021, which pairs element i with element i + D/(2H).
class Attention : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  Attention(const AttentionConfig& config, const Initialiser& init);

  // Maps x [B, T, D] to [B, T, D], without the residual. cu_seqlens is as in Mixer; positions start at 0 in each
  // sequence. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;
  // Returns whether this function waits for a GPU to read cu_seqlens on the CPU.
  bool waits_for_gpu() const { return true; }

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
