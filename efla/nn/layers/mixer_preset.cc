#include "efla/nn/layers/mixer_preset.h"

#include "efla/base/error.h"
#include "efla/rule/validate.h"

namespace efla::nn {

const std::vector<MixerPreset>& mixer_presets() {
  using enum BetaActivation;
  static const std::vector<MixerPreset> presets{
      // Yang et al., "Parallelizing linear transformers with the delta rule over sequence length", 2024.
      {.name = "deltanet", .step = "euler", .qk_l2norm = true},
      // Eigenvalues down to −1 by erasing twice what is written: Grazzi et al., "Unlocking state-tracking in linear
      // RNNs through negative eigenvalues", 2024.
      {.name = "deltanet-neg", .step = "euler", .erase_scale = 2.0, .qk_l2norm = true},
      // The same with twice β in the write too, as flash-linear-attention does it.
      {.name = "deltanet-neg-fla", .step = "euler", .erase_scale = 2.0, .write_scale = 2.0, .qk_l2norm = true},
      // EFLA paper, equation 20; adaptive and loose: its section 5.2.
      {.name = "efla", .step = "exact"},
      {.name = "efla-adaptive", .step = "exact", .adaptive = true},
      {.name = "efla-loose", .step = "exact", .beta = softplus},
      // EFLA paper, equations 11 and 12.
      {.name = "rk2", .step = "rk2"},
      {.name = "rk4", .step = "rk4"},
      // Liu et al., "Longhorn: state space models are amortized online learners", 2024.
      {.name = "longhorn", .step = "implicit_euler"},
      {.name = "trapezoid", .step = "trapezoid"},
      // Yang et al., "Gated delta networks: improving Mamba2 with delta rule", 2024, and its exact step.
      {.name = "gdn", .step = "euler", .qk_l2norm = true, .gate = Gate::scalar},
      {.name = "efla-gdn", .step = "exact", .gate = Gate::scalar},
      // Kimi team, "Kimi Linear", 2025; the second paper's conditions C1 (kda), C2 (kda-exact) and C3 (kda-exact-nol2),
      // and C3 with the safe gate.
      {.name = "kda", .step = "euler", .qk_l2norm = true, .gate = Gate::channel},
      {.name = "kda-exact", .step = "exact", .qk_l2norm = true, .gate = Gate::channel},
      {.name = "kda-exact-nol2", .step = "exact", .gate = Gate::channel},
      {.name = "efla-kda", .step = "exact", .gate = Gate::safe_channel},
      // Katharopoulos et al., "Transformers are RNNs", 2020: S_t = S_{t−1} + k_t v_tᵀ.
      {.name = "linear", .step = "euler", .erase_scale = 0.0, .beta = one},
      {.name = "softmax", .step = "euler", .beta = one, .softmax = true},
  };
  return presets;
}

const MixerPreset& mixer_preset(std::string_view name) {
  std::vector<std::string> names;
  std::string list;
  for (const auto& preset : mixer_presets()) {
    if (preset.name == name) return preset;
    names.emplace_back(preset.name);
    list += (list.empty() ? "" : ", ") + names.back();
  }
  throw Error("mixer", "name", "'" + std::string(name) + "'",
              "one of " + list + " (nearest: " + nearest_name(name, names) + ")");
}

}  // namespace efla::nn
