#include "efla/nn/families/family_tensors.h"

#include <map>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/sha256.h"
#include "efla/nn/families/gguf_config.h"

namespace efla::nn {
namespace {

constexpr const char* kEmbeddings = "embed_tokens.weight";

// Returns a copy of rows first to first + rows − 1 of each `period` rows of a matrix.
template <class T>
StoredMatrix gathered(const View<const T, 2>& from, std::int64_t first, std::int64_t rows, std::int64_t period) {
  const std::int64_t columns = from.extent[1];
  const auto copy = std::make_shared<std::vector<T>>();
  for (std::int64_t head = first; head < from.extent[0]; head += period) {
    copy->insert(copy->end(), from.at(head), from.at(head) + rows * columns);
  }
  const auto view = View<const T, 2>::contiguous(copy->data(), {std::ssize(*copy) / columns, columns});
  StoredMatrix matrix{.owner = copy};
  if constexpr (std::is_same_v<T, bfloat16>) {
    matrix.narrow = view;
  } else {
    matrix.wide = view;
  }
  return matrix;
}

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
  const auto i = static_cast<std::size_t>(index);
  return layer("layers." + std::to_string(index) + ".", config_.attends[i], config_.sparse[i], &plan);
}

DraftHeadTensors FamilyTensors::draft_head() {
  const std::int64_t width = config_.hidden_size;
  if (!files_.begin_draft_head()) throw Error("model", "draft_head", "a model without tensors mtp.", "0");
  DraftHeadTensors head;
  head.embedding_norm = norm("", {"pre_fc_norm_embedding"}, width);
  head.hidden_norm = norm("", {"pre_fc_norm_hidden"}, width);
  head.fc = files_.matrix("fc.weight", width, 2 * width);
  head.layer = layer("layers.0.", true, config_.experts.count > 0, nullptr);
  head.norm = norm();
  files_.end_draft_head();
  return head;
}

LayerTensors FamilyTensors::layer(const std::string& prefix, bool attends, bool sparse, const MixerPlan* plan) {
  const Family& family = *config_.family;
  const std::int64_t width = config_.hidden_size;
  LayerTensors layer;
  layer.attends = attends;
  const NormNames& norms = layer.attends ? family.attention_norms : family.delta_norms;
  layer.before_mixer = norm(prefix, norms.before_mixer, width);
  layer.after_mixer = norm(prefix, norms.after_mixer, width);
  layer.before_mlp = norm(prefix, norms.before_mlp, width);
  layer.after_mlp = norm(prefix, norms.after_mlp, width);
  if (layer.attends) {
    layer.attention = attention(prefix + "self_attn.");
  } else {
    layer.mixer = mixer(prefix + "linear_attn.", *plan);
  }
  if (sparse) {
    layer.experts = experts(prefix + "mlp.");
  } else {
    layer.mlp = mlp(prefix + "mlp.", config_.intermediate_size);
  }
  return layer;
}

MlpTensors FamilyTensors::mlp(const std::string& prefix, std::int64_t inner) {
  const std::int64_t width = config_.hidden_size;
  return {{files_.matrix(prefix + "gate_proj.weight", inner, width),
           files_.matrix(prefix + "up_proj.weight", inner, width)},
          files_.matrix(prefix + "down_proj.weight", width, inner)};
}

// The experts' matrices are tensors of their own, or all of a layer form two tensors.
ExpertTensors FamilyTensors::experts(const std::string& prefix) {
  const ExpertsConfig& config = config_.experts;
  const std::int64_t width = config_.hidden_size;
  ExpertTensors tensors;
  tensors.router = files_.matrix(prefix + "gate.weight", config.count, width);
  tensors.shared_gate = files_.matrix(prefix + "shared_expert_gate.weight", 1, width);
  tensors.router.keep = tensors.shared_gate.keep = true;
  tensors.shared = mlp(prefix + "shared_expert.", config.shared_width);
  const std::string own = prefix + "experts.";
  for (const std::string after : {"", ".weight"}) {
    if (!files_.has(own + "gate_up_proj" + after)) continue;
    const auto gate_up = files_.matrices(own + "gate_up_proj" + after, config.count, 2 * config.width, width);
    const auto down = files_.matrices(own + "down_proj" + after, config.count, width, config.width);
    for (std::size_t e = 0; e < gate_up.size(); ++e) tensors.experts.push_back({{gate_up[e]}, down[e]});
    return tensors;
  }
  for (std::int64_t e = 0; e < config.count; ++e) {
    tensors.experts.push_back(mlp(own + std::to_string(e) + ".", config.width));
  }
  return tensors;
}

// Copies the rows of the family's packed weights into a matrix per projection, in the order of MixerPlan::projections.
std::vector<StoredMatrix> FamilyTensors::unpacked(const std::string& prefix, const MixerPlan& plan) {
  const std::int64_t heads = plan.config.heads, group = plan.config.value_heads / heads;
  const std::int64_t keys = plan.config.key_dim, values = group * plan.config.value_dim;
  const std::map<char, std::int64_t> rows_of_part{{'q', keys},   {'k', keys},  {'v', values},
                                                  {'z', values}, {'b', group}, {'a', group}};
  std::map<char, StoredMatrix> parts;
  for (const auto& [name, letters] : config_.family->packed) {
    std::int64_t per_head = 0, first = 0;
    for (const char letter : letters) per_head += rows_of_part.at(letter);
    const auto all = files_.matrix(prefix + std::string(name) + ".weight", heads * per_head, config_.hidden_size);
    for (const char letter : letters) {
      const std::int64_t rows = rows_of_part.at(letter);
      parts[letter] =
          all.narrow ? gathered(all.narrow, first, rows, per_head) : gathered(all.wide, first, rows, per_head);
      first += rows;
    }
  }
  parts['b'].keep = parts['a'].keep = true;
  std::vector<StoredMatrix> in;
  for (const char letter : std::string_view("qkvbaz")) in.push_back(std::move(parts.at(letter)));
  return in;
}

MixerTensors FamilyTensors::mixer(const std::string& prefix, const MixerPlan& plan) {
  const Family& family = *config_.family;
  const std::int64_t width = config_.hidden_size, heads = plan.config.value_heads;
  MixerTensors mixer;
  if (!family.packed.empty()) mixer.in = unpacked(prefix, plan);
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
    for (const auto& part : files->stored(name)) hash.update(part);
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
