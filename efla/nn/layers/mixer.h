// The token mixer: projections, short convolution, the delta rule of a preset, output norm. Parameter names and shapes
// are those of flash-linear-attention's layers.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "efla/nn/layers/mixer_preset.h"
#include "efla/nn/layers/parameters.h"
#include "efla/rule/problem.h"

namespace efla::nn {

struct MixerConfig {
  std::string mixer = "efla";  // a name of mixer_presets()
  std::int64_t hidden = 64;    // width D of input and output
  std::int64_t heads = 1;      // of hidden / heads keys and values each
  std::int64_t conv = 4;       // taps of the short convolution on q, k and v; 0 leaves it out, the SiLU stays
  bool output_norm = true;     // RMS norm of each head's output
};

// Throws Error, naming the field.
void validate(const MixerConfig& config);

// y = o_proj(norm(rule(silu(conv(q_proj x)), silu(conv(k_proj x)), silu(conv(v_proj x)), β(b_proj x)))).
class Mixer : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  Mixer(const MixerConfig& config, const Initialiser& init);

  // x [B, T, D] float32 → [B, T, D], without the residual. May be called by several threads at once.
  torch::Tensor forward(const torch::Tensor& x) const;

 private:
  torch::Tensor projection() const;                  // [3·D + …, D]: q, k, v and, where there are such, b and a
  torch::Tensor beta(const torch::Tensor& b) const;  // [B, T, H] → [B, T, H]
  // The decay [B, T, H] or [B, T, H, D/H] from x and a = a_proj x; undefined without one.
  torch::Tensor decay(const torch::Tensor& x, const torch::Tensor& a) const;
  torch::Tensor causal_softmax(const torch::Tensor& qkv) const;  // [B, T, 3·D] → [B, T, H, D/H]

  MixerConfig config_;
  const MixerPreset& preset_;
  DeltaRule rule_;
  std::shared_ptr<Weight> q_proj_, k_proj_, v_proj_, b_proj_, q_conv_, k_conv_, v_conv_, o_norm_, o_proj_;
  std::shared_ptr<Weight> a_proj_, f_proj_in_, f_proj_out_;
  torch::Tensor alpha_;            // [H] of an adaptive β
  torch::Tensor a_log_, dt_bias_;  // of a gate: [H] and [H], or [H·D/H] by channel
};

}  // namespace efla::nn
