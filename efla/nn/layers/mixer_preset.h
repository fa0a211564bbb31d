// The mixers by name: rows of choices for one layer, not code.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::nn {

// How a projection b of the input becomes β.
enum class BetaActivation { sigmoid, softplus, one };

// How projections of the input become the decay g = log of D.
//
//   none
//   scalar        −exp(A_log) softplus(a_proj x + dt_bias)          one per head: Gated DeltaNet
//   channel       −exp(A_log) softplus(f_proj x + dt_bias)          one per key channel: Kimi Delta Attention
//   safe_channel  kGateLowerBound · sigmoid(exp(A_log) (f_proj x + dt_bias))    its safe gate, in (kGateLowerBound, 0)
enum class Gate { none, scalar, channel, safe_channel };

inline constexpr double kGateLowerBound = -5.0;

struct MixerPreset {
  std::string_view name;
  std::string_view step;  // as parse_step_size reads it
  double erase_scale = 1.0, write_scale = 1.0;
  BetaActivation beta = BetaActivation::sigmoid;
  bool adaptive = false;   // β is multiplied by softplus(α), α learned per head, 1 at the start
  bool qk_l2norm = false;  // q and k have unit length
  bool softmax = false;    // causal softmax attention instead of the delta rule
  Gate gate = Gate::none;
};

// Every preset, in the order in which they are shown.
const std::vector<MixerPreset>& mixer_presets();

// The preset of that name; throws Error with the nearest name and the list.
const MixerPreset& mixer_preset(std::string_view name);

}  // namespace efla::nn
