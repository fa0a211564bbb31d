// The plan of a mixer: everything that follows from its configuration. The modules of training (mixer.h,
// softmax_mixer.h), the inference on a CPU and the decoder on a GPU read the same plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/rule/gate_activation.h"
#include "efla/rule/mixer_preset.h"
#include "efla/rule/problem.h"

namespace efla::nn {

// The factor on the normalised output of each head.
//
//   none
//   silu          silu(g_proj x)                  Gated DeltaNet
//   sigmoid       sigmoid(g_proj.1 g_proj.0 x)    Kimi Delta Attention: rank V, with a bias
//   full_sigmoid  sigmoid(g_proj x)               Comba
enum class OutputGate { none, silu, sigmoid, full_sigmoid };

// Returns whether an output gate has one projection of full rank.
constexpr bool is_full_rank(OutputGate gate) { return gate == OutputGate::silu || gate == OutputGate::full_sigmoid; }

// Returns the activation of an output gate that is not none.
constexpr GateActivation activation_of(OutputGate gate) {
  return gate == OutputGate::silu ? GateActivation::silu : GateActivation::sigmoid;
}

// The inner sizes of RWKV-7's pairs of projections: of the decay, of a (how much of the key is erased), of the mixing
// of values with the first layer's, and of the output gate. 0: as flash-linear-attention's layer, by D and K.
struct LowRanks {
  std::int64_t decay = 0, a = 0, value = 0, gate = 0;
};

struct MixerConfig {
  std::string mixer = "efla";  // a name of mixer_presets()
  std::int64_t hidden = 64;    // width D of input and output
  std::int64_t heads = 1;      // H, of queries and keys
  std::int64_t conv = 4;       // taps of the short convolution on q, k and v; 0: none, the activations stay
  bool output_norm = true;     // whether each head's output has an RMS norm

  std::int64_t value_heads = 0;             // HV, a multiple of heads; 0: equal to heads
  std::int64_t key_dim = 0, value_dim = 0;  // K and V; 0: hidden / heads
  std::int64_t steps_per_token = 0;         // n, above 1 only for presets with several; 0: the preset's
  OutputGate output_gate = OutputGate::none;
  bool learned_beta = true;            // false: β has no projection, and 1 in its place
  double beta_scale = 1.0;             // factor of β, or of b of the erase key b ⊙ k
  std::string qk_activation = "silu";  // silu, relu, elu (which is elu(x) + 1) or identity
  bool qk_sum_norm = false;            // divide q and k by their absolute sums instead of the preset's norm
  // In [−5, 0), for mixers with a channel gate: use the safe gate with this bound, and start A_log at 0.
  std::optional<double> lower_bound = {};
  double norm_eps = 1e-6;  // of the output norm

  // Of rwkv7, whose layers differ: the index of the layer in the model, and the number of layers.
  std::int64_t layer = 0, layers = 1;
  LowRanks low_ranks = {};
};

// Throws Error that names the field.
void validate(const MixerConfig& config);

// Returns the output gate that flash-linear-attention's layer of a mixer has.
constexpr OutputGate output_gate_of(const MixerPreset& preset) {
  if (preset.erase_key == EraseKey::closed_loop) return OutputGate::full_sigmoid;
  return is_by_channel(preset.gate) ? OutputGate::sigmoid : OutputGate::silu;
}

// Columns of the product of a mixer's input with all its projections; none if the mixer lacks the projection.
struct Columns {
  std::int64_t first = 0, count = 0;

  explicit constexpr operator bool() const { return count > 0; }
};

// A projection of a mixer's input: its weight [columns.count, D] is the parameter NAME.weight.
struct Projection {
  std::string name;
  Columns columns;
};

struct MixerPlan {
  static constexpr std::size_t kQkv = 3;  // the first projections are of q, k and v

  // Plans a mixer for a configuration that validate accepts.
  explicit MixerPlan(const MixerConfig& config);

  // Returns the property of the mixer that inference does not support: softmax attention, rwkv7, no short convolution,
  // another activation than silu, or qk_norm sum. Returns "" if there is none.
  std::string refusal() const;

  // Returns the projections that training multiplies as one weight: all except a gate of full rank. A product with it
  // too would have other bits, because the gradient of the input would be one sum over all columns.
  std::span<const Projection> joint() const;

  std::int64_t keys() const { return config.heads * config.key_dim; }            // H·K
  std::int64_t values() const { return config.value_heads * config.value_dim; }  // HV·V
  std::int64_t steps() const { return config.steps_per_token; }                  // n, of the recurrence per token
  std::int64_t step_keys() const { return steps() * keys(); }                    // n·H·K
  std::int64_t step_values() const { return steps() * values(); }                // n·HV·V
  std::int64_t betas() const { return steps() * config.value_heads; }            // n·HV
  // Returns the number of channels of q, of the keys and of the values of all steps, one step after the other.
  std::int64_t channels() const { return keys() + step_keys() + step_values(); }
  // Returns the number of decays per token, HV or HV·K; 0 without a decay.
  std::int64_t decays() const;

  MixerConfig config;  // with all sizes set
  const MixerPreset& preset;
  Gate gate;
  DeltaRule rule;
  // In the order of their columns: q, k, v, f, g if it is low-rank, b, w, a, and last g if it has full rank, so that
  // joint() is the beginning. Another order would change the bits of training, because the gradient of the input is a
  // sum over the columns.
  std::vector<Projection> projections;
  Columns f;  // f_proj.0, of a decay by channel
  Columns g;  // of the output gate: g_proj.0 or g_proj
  Columns b;  // b_proj, of β or of the erase key b ⊙ k
  Columns w;  // w_proj, of the written value w ⊙ v
  Columns a;  // a_proj, of a decay by head

 private:
  Columns add(std::string name, std::int64_t count);
};

// A plan that a module shares with its parts.
using SharedPlan = std::shared_ptr<const MixerPlan>;

}  // namespace efla::nn
