// The mixers by name. Each mixer is a row of a table. docs/layers.md describes the mixers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "efla/rule/mixer_step.h"
#include "efla/rule/problem.h"

namespace efla {

// The function that computes the decay g, the logarithm of D, from projections of the input x.
//
//   none
//   scalar        −exp(A_log) softplus(a_proj x + dt_bias)          one per head: Gated DeltaNet
//   channel       −exp(A_log) softplus(f_proj x + dt_bias)          one per key channel: Kimi Delta Attention
//   safe_channel  kGateLowerBound · sigmoid(exp(A_log) (f_proj x + dt_bias))    safe gate, in (kGateLowerBound, 0)
enum class Gate { none, scalar, channel, safe_channel };

constexpr bool is_by_channel(Gate gate) { return gate == Gate::channel || gate == Gate::safe_channel; }

// Returns the activation of a gate that is not none.
constexpr DecayActivation decay_activation_of(Gate gate) {
  return gate == Gate::safe_channel ? DecayActivation::sigmoid : DecayActivation::softplus;
}

inline constexpr double kGateLowerBound = -5.0;

// The erase key κ of a token and head, from its key k.
//
//   key          k itself: a rule with one key
//   gated        b ⊙ k, and w ⊙ v is written for v, with b = sigmoid(b_proj x) per key channel and
//                w = sigmoid(w_proj x) per value channel: Gated DeltaNet-2
//   closed_loop  e^(−g) k, so that κ reads the state before its decay e^g; and q − D sigmoid(decay) k reads the state,
//                with D and decay learned per head: Comba
enum class EraseKey { key, gated, closed_loop };

// The least g of a rule whose erase key is closed_loop. Lower values count as this one, because e^(−g) would leave the
// range of float32. The part of the state that remains is below the rounding of float32.
inline constexpr double kClosedLoopLeastDecay = -40.0;

struct MixerPreset {
  std::string_view name;
  std::string_view step;  // for parse_step_size
  double erase_scale = 1.0, write_scale = 1.0;
  BetaActivation beta = BetaActivation::sigmoid;
  bool adaptive = false;   // β is multiplied by softplus(α); α is learned per head, softplus(α) starts at 1
  bool qk_l2norm = false;  // q and k are normalised to unit length
  bool softmax = false;    // causal softmax attention instead of the delta rule
  bool rwkv7 = false;      // the projections, keys and two steps per token of RWKV-7 (nn/layers/rwkv7_mixer.h)
  Gate gate = Gate::none;
  EraseKey erase_key = EraseKey::key;
  std::int64_t steps_per_token = 1;  // n (micro_steps.h); above 1 a default, which a configuration may change
};

// Returns every preset, in display order.
const std::vector<MixerPreset>& mixer_presets();

// Returns the preset with a name. Throws Error with the nearest name and the list if there is none.
const MixerPreset& mixer_preset(std::string_view name);

// Returns the rule of a preset without its decay.
DeltaRule rule_of(const MixerPreset& preset);

}  // namespace efla
