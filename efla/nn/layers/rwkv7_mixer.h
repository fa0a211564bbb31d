// The token mixer of RWKV-7 (Peng et al., 2025, arXiv 2503.14456): a token shift, low-rank projections, and a delta
// rule with two keys and two steps per token. Parameters have the names and shapes of flash-linear-attention's layer
// RWKV7Attention. docs/layers.md has the equations.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "efla/nn/layers/mixer.h"
#include "efla/nn/layers/mixer_input.h"
#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// Two projections D → rank → out with an activation between them, and a bias unless it is undefined.
struct LowRank {
  std::shared_ptr<Weight> in, out;
  torch::Tensor bias;

  torch::Tensor operator()(const torch::Tensor& x, torch::Tensor (*activation)(const torch::Tensor&)) const;
};

// A mixer mixes its values with those of the first layer of the model, `first_values` [B, T, H·V]: the first layer sets
// them, and the later ones read them.
class Rwkv7Mixer : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses, and for another mixer than rwkv7.
  Rwkv7Mixer(const MixerConfig& config, const Initialiser& init);

  // Maps x [B, T, D] to [B, T, D], without the residual. cu_seqlens is as in Mixer. Several threads may call this
  // function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens, torch::Tensor& first_values) const;
  bool waits_for_gpu() const { return false; }

  // Do the same for tokens, or packed sequences, that follow the tokens in states, as in Mixer. MixerState::conv is the
  // last input [B, 1, D]. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, MixerState& state, torch::Tensor& first_values) const;
  torch::Tensor forward(const torch::Tensor& x, const PackedWindows& windows, MixerState& states,
                        torch::Tensor& first_values) const;

  // Returns the state of B empty sequences.
  MixerState initial_state(std::int64_t batch) const;

 private:
  // The inputs of the token shift: r, w, k, v, a and g.
  static constexpr std::array<const char*, 6> kShifted{"r", "w", "k", "v", "a", "g"};

  void register_shift();
  void register_projections(const Initialiser& init);
  // Maps x and the inputs of the tokens before, both [B, T, D], to the outputs, and states [N, H, K, V] to the next
  // ones unless they are undefined. cu_seqlens [N + 1] counts tokens.
  torch::Tensor mix(const torch::Tensor& x, const torch::Tensor& before, const torch::Tensor& cu_seqlens,
                    torch::Tensor* states, torch::Tensor& first_values) const;
  torch::Tensor values_of(const torch::Tensor& x, torch::Tensor& first_values) const;
  torch::Tensor output(const torch::Tensor& o, const torch::Tensor& r, const torch::Tensor& k, const torch::Tensor& v,
                       const torch::Tensor& gate) const;
  torch::Tensor by_heads(const torch::Tensor& x) const;  // [B, T, H·X] → [B, T, H, X]

  SharedPlan plan_;
  std::array<torch::Tensor, kShifted.size()> shift_;  // x_r …, [1, 1, D]
  torch::Tensor k_k_, k_a_, r_k_;                     // [D], [D], [H, K]
  std::shared_ptr<Weight> r_, k_, v_, o_;
  LowRank w_lora_, a_lora_, v_lora_, g_lora_;  // v_lora_ not in the first layer
  std::shared_ptr<Weight> norm_;
  torch::Tensor norm_bias_;
};

}  // namespace efla::nn
