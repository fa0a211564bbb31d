// The token mixer: projections, short convolution, the delta rule of a preset, output norm and output gate. Parameters
// have the names and shapes of flash-linear-attention's layers. docs/layers.md describes the mixers.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cstdint>

#include "efla/nn/layers/mixer_gates.h"
#include "efla/nn/layers/mixer_input.h"
#include "efla/nn/layers/mixer_keys.h"
#include "efla/nn/layers/mixer_output.h"
#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// A mixer's state after the tokens so far.
struct MixerState {
  torch::Tensor memory;  // [B, HV, K, V]
  torch::Tensor conv;    // [B, W − 1, channels], the last inputs of the convolution; undefined without one
};

// Computes y = o_proj(norm(rule(act(conv(q_proj x)), act(conv(k_proj x)), silu(conv(v_proj x)), β(b_proj x))) · gate).
class Mixer : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses, and for the mixer softmax, which is a SoftmaxMixer.
  Mixer(const MixerConfig& config, const Initialiser& init);

  // Maps x [B, T, D] float32 to [B, T, D], without the residual. cu_seqlens [N + 1] int64 with B = 1: 0 and the ends of
  // packed sequences, which do not see each other. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;
  // Returns whether this function waits for a GPU to read cu_seqlens on the CPU.
  bool waits_for_gpu() const { return convolution_.reads_cu_seqlens(); }

  // Does the same for tokens that follow the tokens in the state, and updates the state. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, MixerState& state) const;

  // Does the same for packed sequences, x [1, T, D], which follow the tokens in N states. Replaces the tensors of the
  // states. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, const PackedWindows& windows, MixerState& states) const;

  // Returns the state of B empty sequences.
  MixerState initial_state(std::int64_t batch) const;

 protected:
  // The inputs of the recurrence.
  struct Inputs {
    torch::Tensor qkv;             // [B, T, channels]
    torch::Tensor beta;            // [B, T·n, HV]
    torch::Tensor g;               // [B, T, HV] or [B, T, HV, K], the logarithm of the decay; undefined without one
    torch::Tensor erase_key = {};  // [B, T, H, K] of a rule with two keys
  };

  // Compute the recurrence. A subclass may compute it otherwise, which benchmarks do. The first returns the outputs
  // from empty states, [B, T, HV, V]. The second returns the output [B, HV, V] of one token, T = 1, and updates memory
  // [B, HV, K, V].
  virtual torch::Tensor recur(const Inputs& inputs, const torch::Tensor& cu_seqlens) const;
  virtual torch::Tensor recur_step(const Inputs& inputs, torch::Tensor& memory) const;

  // Splits qkv by heads: q [B, T, H, K], k [B, T·n, H, K], v [B, T·n, HV, V].
  std::array<torch::Tensor, 3> heads_of(const torch::Tensor& qkv) const { return convolution_.heads_of(qkv); }

 private:
  // Returns the ends of packed sequences counted in steps of the recurrence.
  torch::Tensor step_ends(const torch::Tensor& cu_seqlens) const;
  Inputs inputs_of(const torch::Tensor& qkv, const SmallOutputs& small) const;

  SharedPlan plan_;
  MixerGates gates_;
  MixerKeys keys_;
  QkvConvolution convolution_;
  MixerOutput output_;
  JointProjection projection_;
};

}  // namespace efla::nn
