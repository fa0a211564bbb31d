#include "efla/nn/families/family_config.h"

#include "efla/io/json.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void family_config(io::ByteView bytes) {
  static const ScratchFolder folder;
  folder.write("config.json", bytes);
  nn::FamilyConfig config;
  if (!accepts([&] { config = nn::load_family_config(folder.path()); }, bytes.size())) return;
  require(nn::is_family_folder(folder.path()), "a folder of a family");
  for (const auto size : {config.vocab_size, config.hidden_size, config.layers(), config.heads, config.key_value_heads,
                          config.head_dim}) {
    require(size >= 1 && size <= std::int64_t{1} << 31, "sizes in their ranges");
  }
  for (std::int64_t i = 0; i < config.layers(); ++i) {
    const bool sparse = config.sparse[static_cast<std::size_t>(i)];
    require((sparse ? config.experts.width : config.intermediate_size) >= 1, "an MLP or experts in each layer");
  }
  require(config.experts.per_token <= config.experts.count || config.experts.count == 0, "experts per token");
  require(config.heads % config.key_value_heads == 0, "groups of heads");
  require(config.rotary >= 0 && config.rotary <= config.head_dim && config.rotary % 2 == 0, "rotated elements");
  require(config.norm_eps > 0.0 && config.rope_theta > 1.0, "positive numbers");
  // A model is made from it: its mixers are planned without an error.
  const nn::MixerPlan plan(config.mixer);
  require(plan.channels() > 0 && plan.values() > 0, "mixers with channels");
}

}  // namespace efla::fuzz
