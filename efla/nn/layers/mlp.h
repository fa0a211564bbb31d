// The gated MLP of each layer, with the parameter names of flash-linear-attention.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// Computes down_proj(silu(gate_proj x) ⊙ up_proj x), the SwiGLU of Shazeer, "GLU variants improve transformer", 2020.
class Mlp : public torch::nn::Module {
 public:
  Mlp(std::int64_t hidden, std::int64_t inner, const Initialiser& init);

  // Maps x [B, T, D] to [B, T, D]. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x) const;

 private:
  std::shared_ptr<Weight> gate_proj_, up_proj_, down_proj_;
};

}  // namespace efla::nn
