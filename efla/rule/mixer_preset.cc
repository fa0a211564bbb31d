#include "efla/rule/mixer_preset.h"

#include "efla/base/error.h"
#include "efla/base/text.h"

namespace efla {

const std::vector<MixerPreset>& mixer_presets() {
  using enum BetaActivation;
  static const std::vector<MixerPreset> presets{
      // DeltaNet: Yang et al., 2024 (arXiv 2406.06484).
      {.name = "deltanet", .step = "euler", .qk_l2norm = true},
      // Eigenvalues down to −1, because a token erases twice as much as it writes: Grazzi et al., 2024 (arXiv
      // 2411.12537).
      {.name = "deltanet-neg", .step = "euler", .erase_scale = 2.0, .qk_l2norm = true},
      // The same with 2β in the write as well, as in flash-linear-attention.
      {.name = "deltanet-neg-fla", .step = "euler", .erase_scale = 2.0, .write_scale = 2.0, .qk_l2norm = true},
      // EFLA (arXiv 2512.12602), equation 20; adaptive and loose: section 5.2.
      {.name = "efla", .step = "exact"},
      {.name = "efla-adaptive", .step = "exact", .adaptive = true},
      {.name = "efla-loose", .step = "exact", .beta = softplus},
      // EFLA, equations 11 and 12.
      {.name = "rk2", .step = "rk2"},
      {.name = "rk4", .step = "rk4"},
      // Longhorn: Liu et al., 2024 (arXiv 2407.14207).
      {.name = "longhorn", .step = "implicit_euler"},
      {.name = "trapezoid", .step = "trapezoid"},
      // Gated DeltaNet: Yang et al., 2024 (arXiv 2412.06464). efla-gdn has the exact step instead.
      {.name = "gdn", .step = "euler", .qk_l2norm = true, .gate = Gate::scalar},
      {.name = "efla-gdn", .step = "exact", .gate = Gate::scalar},
      // KDA: Kimi Team, 2025 (arXiv 2510.26692). kda, kda-exact and kda-exact-nol2 are the conditions C1, C2 and C3 of
      // the study of exponential integrators in KDA (docs/equations.md); efla-kda is C3 with the safe gate.
      {.name = "kda", .step = "euler", .qk_l2norm = true, .gate = Gate::channel},
      {.name = "kda-exact", .step = "exact", .qk_l2norm = true, .gate = Gate::channel},
      {.name = "kda-exact-nol2", .step = "exact", .gate = Gate::channel},
      {.name = "efla-kda", .step = "exact", .gate = Gate::safe_channel},
      // Gated DeltaNet-2 (arXiv 2605.22791), and the same with the exact step.
      {.name = "gdn2",
       .step = "euler",
       .beta = one,
       .qk_l2norm = true,
       .gate = Gate::channel,
       .erase_key = EraseKey::gated},
      {.name = "gdn2-exact",
       .step = "exact",
       .beta = one,
       .qk_l2norm = true,
       .gate = Gate::channel,
       .erase_key = EraseKey::gated},
      // Comba: Hu et al., 2025 (arXiv 2506.02475), and the same with the exact step.
      {.name = "comba", .step = "euler", .qk_l2norm = true, .gate = Gate::scalar, .erase_key = EraseKey::closed_loop},
      {.name = "comba-exact",
       .step = "exact",
       .qk_l2norm = true,
       .gate = Gate::scalar,
       .erase_key = EraseKey::closed_loop},
      // DeltaProduct: Siems et al., 2025 (arXiv 2502.10297), and with a decay Gated DeltaProduct. β is doubled as in
      // flash-linear-attention by the field allow_neg_eigval, or by the mixer's name.
      {.name = "deltaproduct", .step = "euler", .qk_l2norm = true, .steps_per_token = 2},
      {.name = "deltaproduct-neg",
       .step = "euler",
       .erase_scale = 2.0,
       .write_scale = 2.0,
       .qk_l2norm = true,
       .steps_per_token = 2},
      {.name = "deltaproduct-exact", .step = "exact", .qk_l2norm = true, .steps_per_token = 2},
      {.name = "gated-deltaproduct", .step = "euler", .qk_l2norm = true, .gate = Gate::scalar, .steps_per_token = 2},
      {.name = "gated-deltaproduct-exact",
       .step = "exact",
       .qk_l2norm = true,
       .gate = Gate::scalar,
       .steps_per_token = 2},
      // RWKV-7: Peng et al., 2025 (arXiv 2503.14456). In rwkv7-exact the step that erases is exact.
      {.name = "rwkv7", .step = "euler", .beta = one, .rwkv7 = true, .gate = Gate::channel},
      {.name = "rwkv7-exact", .step = "exact", .beta = one, .rwkv7 = true, .gate = Gate::channel},
      // Linear attention: Katharopoulos et al., 2020 (arXiv 2006.16236): S_t = S_{t−1} + k_t v_tᵀ.
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
  throw Error("mixer", "mixer", "'" + std::string(name) + "'",
              "one of " + list + " (nearest: " + nearest_name(name, names) + ")");
}

DeltaRule rule_of(const MixerPreset& preset) {
  DeltaRule rule;
  rule.step = parse_step_size(std::string(preset.step));
  rule.step.erase_scale = preset.erase_scale;
  rule.step.write_scale = preset.write_scale;
  rule.qk_l2norm = preset.qk_l2norm;
  rule.two_keys = preset.rwkv7 || preset.erase_key != EraseKey::key;
  if (preset.rwkv7) rule.scale = 1.0;
  return rule;
}

}  // namespace efla
