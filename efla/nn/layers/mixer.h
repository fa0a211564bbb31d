// The token mixer: projections, short convolution, the delta rule of a preset, output norm and output gate. Parameters
// have the names and shapes of flash-linear-attention's layers. docs/layers.md describes the mixers.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// A mixer's state after the tokens so far.
struct MixerState {
  torch::Tensor memory;  // [B, HV, K, V]
  torch::Tensor conv;    // [B, W − 1, 2·H·K + HV·V], the last inputs of the convolution; undefined without one
};

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

// Functions that replace the kernels in mixers without decay, to compare implementations inside a model (efla bench
// model). A prefill with a state still uses the kernels.
struct Recurrence {
  // Maps q, k [B, T, H, K], v [B, T, HV, V] and β [B, T, HV] to o [B, T, HV, V]; each batch entry is one sequence.
  std::function<torch::Tensor(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                              const torch::Tensor& beta)>
      sequence;
  // Computes one token (without the axis T) and updates memory [B, HV, K, V].
  std::function<torch::Tensor(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                              const torch::Tensor& beta, torch::Tensor& memory)>
      step;
};

// Computes y = o_proj(norm(rule(act(conv(q_proj x)), act(conv(k_proj x)), silu(conv(v_proj x)), β(b_proj x))) · gate).
class Mixer : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  Mixer(const MixerConfig& config, const Initialiser& init);

  // Maps x [B, T, D] float32 to [B, T, D], without the residual. cu_seqlens [N + 1] int64 with B = 1: 0 and the ends of
  // packed sequences, which do not see each other. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;
  // Returns whether this function waits for a GPU to read cu_seqlens on the CPU.
  bool waits_for_gpu() const { return plan_.config.conv > 0 && plan_.config.qk_activation != "silu"; }

  // Does the same for tokens that follow the tokens in the state, and updates the state. Not differentiable. Throws
  // Error for the mixer softmax, as does the next function.
  torch::Tensor forward(const torch::Tensor& x, MixerState& state) const;

  // Does the same for packed sequences, x [1, T, D], which follow the tokens in N states. Replaces the tensors of the
  // states. Not differentiable.
  torch::Tensor forward(const torch::Tensor& x, const PackedWindows& windows, MixerState& states) const;

  // Returns the state of B empty sequences.
  MixerState initial_state(std::int64_t batch) const;

  // Sets the functions that compute the recurrence; empty functions restore the kernels. Throws Error for a mixer with
  // a decay.
  void set_recurrence(Recurrence recurrence);

 private:
  // Splits a tensor [B, T, 2·H·K + HV·V] by heads: q, k [B, T, H, K], v [B, T, HV, V].
  std::array<torch::Tensor, 3> heads_of(const torch::Tensor& qkv) const;

  void register_decay(const Initialiser& init);
  void register_output(const Initialiser& init);
  // The outputs of the small projections, [B, T, ·]; undefined if the mixer does not have them.
  struct Gates {
    torch::Tensor f, g, b, a;  // of the channel gate, the sigmoid gate, β and the scalar gate
  };

  std::vector<torch::Tensor> gate_weights() const;  // [·, D]: of f, g, b and a, if they exist
  std::vector<torch::Tensor> projections() const;   // [·, D]: of q, k and v, then gate_weights()
  // Returns the outputs of projections() side by side, [B, T, ·], and on a GPU perhaps further columns.
  torch::Tensor projected(const torch::Tensor& x) const;
  // Splits the columns of projected() after q, k and v.
  Gates gates_of(const torch::Tensor& columns) const;
  torch::Tensor taps() const;  // [2·H·K + HV·V, 1, W]
  // Returns the first columns of `projected` after convolution and activation, [B, T, 2·H·K + HV·V], and the remaining
  // columns.
  std::pair<torch::Tensor, torch::Tensor> convolved(const torch::Tensor& projected,
                                                    const torch::Tensor& cu_seqlens) const;
  torch::Tensor activated(const torch::Tensor& qkv) const;   // applies the activations to the sums of the convolution
  torch::Tensor sum_normed(const torch::Tensor& qkv) const;  // divides q and k by their absolute sums
  torch::Tensor beta(const Gates& gates, const torch::Tensor& qkv) const;  // [B, T, HV] in the type of qkv
  // Returns the decay [B, T, HV] or [B, T, HV, K]; undefined without a decay.
  torch::Tensor decay(const Gates& gates) const;
  torch::Tensor causal_softmax(const torch::Tensor& qkv) const;  // [B, T, 3·D] → [B, T, H, D/H]
  // Returns the output gate before its activation, [B, T, HV, V].
  torch::Tensor output_gate(const torch::Tensor& x, const Gates& gates) const;
  // o [B, T, HV, V] → [B, T, D]
  torch::Tensor output(const torch::Tensor& x, const Gates& gates, torch::Tensor o) const;

  MixerPlan plan_;
  Recurrence recurrence_;
  std::shared_ptr<Weight> q_proj_, k_proj_, v_proj_, b_proj_, q_conv_, k_conv_, v_conv_, o_norm_, o_proj_;
  std::shared_ptr<Weight> a_proj_, f_proj_in_, f_proj_out_, g_proj_in_, g_proj_out_;
  torch::Tensor alpha_;            // [HV] of an adaptive β
  torch::Tensor a_log_, dt_bias_;  // of a decay: [HV] and [HV], or [HV·K] with a channel gate
  torch::Tensor g_bias_;           // [HV·V] of the sigmoid gate
};

}  // namespace efla::nn
