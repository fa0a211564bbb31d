// The dispatcher's functions that tell Python the mixers' rules.
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "efla/base/error.h"
#include "efla/rule/mixer_preset.h"

namespace efla::autograd {
namespace {

std::string beta_name(BetaActivation beta) {
  switch (beta) {
    case BetaActivation::sigmoid:
      return "sigmoid";
    case BetaActivation::softplus:
      return "softplus";
    case BetaActivation::one:
      return "one";
  }
  return "";
}

// Returns whether a mixer computes a delta rule with one key and one step per token.
bool is_plain(const MixerPreset& preset) {
  return !preset.softmax && !preset.rwkv7 && preset.erase_key == EraseKey::key && preset.steps_per_token == 1;
}

// Returns the names of such mixers.
std::vector<std::string> mixer_names() {
  std::vector<std::string> names;
  for (const auto& preset : mixer_presets()) {
    if (is_plain(preset)) names.emplace_back(preset.name);
  }
  return names;
}

// Returns the fields of a preset that schemas can express: decay is scalar, channel or none, and lower_bound is given
// with the safe gate. Throws Error for a name that is not one of mixer_names().
std::tuple<std::string, double, double, bool, std::string, bool, c10::optional<std::string>, c10::optional<double>>
mixer_rule(const std::string& name) {
  const MixerPreset& preset = mixer_preset(name);
  if (!is_plain(preset)) {
    throw Error("mixer_rule", "name", "'" + name + "'", "a mixer with a delta rule of one key and one step per token");
  }
  c10::optional<std::string> decay;
  if (preset.gate != Gate::none) decay = is_by_channel(preset.gate) ? "channel" : "scalar";
  c10::optional<double> lower_bound;
  if (preset.gate == Gate::safe_channel) lower_bound = kGateLowerBound;
  return {std::string(preset.step),
          preset.erase_scale,
          preset.write_scale,
          preset.qk_l2norm,
          beta_name(preset.beta),
          preset.adaptive,
          decay,
          lower_bound};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(efla, library) {
  library.def("mixer_names() -> str[]", mixer_names);
  library.def(
      "mixer_rule(str name) -> (str step, float erase_scale, float write_scale, bool qk_l2norm, str beta, "
      "bool adaptive, str? decay, float? lower_bound)",
      mixer_rule);
}

}  // namespace efla::autograd
