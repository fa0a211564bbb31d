#include "efla/nn/families/family_tensors.h"

#include <string_view>
#include <utility>

#include "efla/io/file.h"
#include "efla/io/sha256.h"
#include "efla/nn/families/gguf_config.h"

namespace efla::nn {
namespace {

constexpr const char* kEmbeddings = "embed_tokens.weight";

}  // namespace

FamilyTensors::FamilyTensors(const std::filesystem::path& folder, const FamilyConfig& config)
    : config_(config), files_(folder, *config.family) {
  config_.tied = config.tied && !(files_.has_head() && files_.has(kEmbeddings));
  if (is_gguf(folder)) {
    config_text_ = gguf_config(io::GgufFile(folder)).dump();
    return;
  }
  const auto text = io::read_file(folder / "config.json");
  config_text_.assign(text.begin(), text.end());
}

Vector FamilyTensors::norm(const std::string& prefix, const Names& names, std::int64_t size) {
  if (names.empty()) return {};
  auto weight = files_.vector(files_.first_of(prefix, names, ".weight"), {size});
  if (config_.family->zero_centred_norms && !files_.has_whole_norms()) {
    for (auto& w : weight) w += 1.0F;
  }
  return weight;
}

Vector FamilyTensors::norm() { return norm("", {"norm"}, config_.hidden_size); }

StoredMatrix FamilyTensors::embeddings() {
  if (config_.tied && !files_.has(kEmbeddings)) return head();
  return files_.matrix(kEmbeddings, config_.vocab_size, config_.hidden_size);
}

StoredMatrix FamilyTensors::head() { return files_.head(config_.vocab_size, config_.hidden_size); }

LayerTensors FamilyTensors::layer(std::int64_t index, const MixerPlan& plan) {
  const Family& family = *config_.family;
  const std::string prefix = "layers." + std::to_string(index) + ".";
  const std::int64_t width = config_.hidden_size, inner = config_.intermediate_size;
  LayerTensors layer;
  layer.attends = config_.attends[static_cast<std::size_t>(index)];
  const NormNames& norms = layer.attends ? family.attention_norms : family.delta_norms;
  layer.before_mixer = norm(prefix, norms.before_mixer, width);
  layer.after_mixer = norm(prefix, norms.after_mixer, width);
  layer.before_mlp = norm(prefix, norms.before_mlp, width);
  layer.after_mlp = norm(prefix, norms.after_mlp, width);
  if (layer.attends) {
    layer.attention = attention(prefix + "self_attn.");
  } else {
    layer.mixer = mixer(prefix + "linear_attn.", plan);
  }
  layer.gate_up = {files_.matrix(prefix + "mlp.gate_proj.weight", inner, width),
                   files_.matrix(prefix + "mlp.up_proj.weight", inner, width)};
  layer.down = files_.matrix(prefix + "mlp.down_proj.weight", width, inner);
  return layer;
}

MixerTensors FamilyTensors::mixer(const std::string& prefix, const MixerPlan& plan) {
  const Family& family = *config_.family;
  const std::int64_t width = config_.hidden_size, heads = plan.config.value_heads;
  MixerTensors mixer;
  auto next = plan.projections.begin();
  for (const auto& [name, count] : family.projections) {
    std::int64_t rows = 0;
    // Step sizes and decays have one row per head: rounding them would save nothing.
    const bool keep = next->columns.first == plan.a.first || next->columns.first == plan.b.first;
    for (int i = 0; i < count; ++i) rows += (next++)->columns.count;
    mixer.in.push_back(files_.matrix(prefix + std::string(name) + ".weight", rows, width));
    mixer.in.back().keep = keep;
  }
  std::vector<std::string> taps;
  for (const auto name : family.convolutions) taps.push_back(prefix + std::string(name) + ".weight");
  mixer.taps = files_.taps(taps, plan.channels(), plan.config.conv);
  mixer.o_norm = files_.vector(prefix + std::string(family.output_norm) + ".weight", {plan.config.value_dim});
  mixer.out = files_.matrix(prefix + std::string(family.output) + ".weight", width, plan.values());
  mixer.dt_bias = files_.vector(prefix + "dt_bias", {heads});
  mixer.a_log = files_.vector(prefix + "A_log", {heads});
  return mixer;
}

AttentionTensors FamilyTensors::attention(const std::string& prefix) {
  const Family& family = *config_.family;
  const std::int64_t width = config_.hidden_size, dim = config_.head_dim;
  const std::int64_t queries = config_.heads * dim, keys = config_.key_value_heads * dim;
  AttentionTensors attention;
  attention.in = {files_.matrix(prefix + "q_proj.weight", family.gated_attention ? 2 * queries : queries, width),
                  files_.matrix(prefix + "k_proj.weight", keys, width),
                  files_.matrix(prefix + "v_proj.weight", keys, width)};
  attention.out = files_.matrix(prefix + "o_proj.weight", width, queries);
  attention.q_norm = norm(prefix, {"q_norm"}, family.norm_per_head ? dim : queries);
  attention.k_norm = norm(prefix, {"k_norm"}, family.norm_per_head ? dim : keys);
  return attention;
}

std::string FamilyTensors::fingerprint() const {
  const auto files = files_.share();
  io::Sha256 hash;
  hash.update(io::as_bytes(config_text_));
  for (const auto& name : files->names()) {
    hash.update(io::as_bytes(name));
    hash.update(files->stored(name));
  }
  return hash.digest();
}

std::vector<StatePart> family_state_parts(const FamilyConfig& config, const MixerPlan& plan) {
  std::vector<StatePart> parts;
  std::size_t at = 0;
  const auto add = [&](std::int64_t layer, const char* name, const std::vector<std::int64_t>& shape) {
    std::int64_t floats = 1;
    for (const auto size : shape) floats *= size;
    parts.push_back({"layers." + std::to_string(layer) + "." + name, shape, at, static_cast<std::size_t>(floats)});
    at += parts.back().floats;
  };
  const MixerConfig& mixer = plan.config;
  for (std::int64_t i = 0; i < config.layers(); ++i) {
    if (config.attends[static_cast<std::size_t>(i)]) continue;
    add(i, "memory", {1, mixer.value_heads, mixer.key_dim, mixer.value_dim});
    add(i, "conv", {1, mixer.conv - 1, plan.channels()});
  }
  return parts;
}

}  // namespace efla::nn
