#include "efla/nn/families/family_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/io/file.h"
#include "efla/io/sha256.h"
#include "efla/ops/layers/glu.h"
#include "efla/rule/decay_activation.h"

namespace efla::nn {
namespace {

// Of the decay −rate · softplus(z + bias): the rate is exp(A_log), which is bounded as in decay_activation.h.
struct DecayRates {
  Vector rate, bias;
};

DecayRates decay_rates(Vector dt_bias, const Vector& a_log) {
  constexpr float kLargest = kLargestLogRate<float>;
  DecayRates rates{Vector(a_log.size()), std::move(dt_bias)};
  for (std::size_t h = 0; h < a_log.size(); ++h) {
    rates.rate[h] = std::exp(std::min(a_log[h], kLargest));
    rates.bias[h] += std::max(a_log[h] - kLargest, 0.0F);
  }
  return rates;
}

}  // namespace

FamilyModel::FamilyModel(const std::filesystem::path& folder, WeightType weights, KeyValueType keys_values)
    : config_(load_family_config(folder)), mixers_(config_.mixer), attention_(config_, keys_values) {
  FamilyWeights files(folder, *config_.family);
  files_ = files.share();
  const auto text = io::read_file(folder / "config.json");
  config_text_.assign(text.begin(), text.end());
  const std::int64_t width = config_.hidden_size;
  norm_ = load_norm("", {"norm"}, width, files);
  const StoredMatrix embeddings = files.matrix("embed_tokens.weight", config_.vocab_size, width);
  if (config_.tied) {
    head_ = PackedWeight(std::span(&embeddings, 1), weights);
  } else {
    embeddings_ = PackedWeight(std::span(&embeddings, 1), WeightType::float32);
    const StoredMatrix head = files.head(config_.vocab_size, width);
    head_ = PackedWeight(std::span(&head, 1), weights);
  }
  for (std::int64_t i = 0; i < config_.layers(); ++i) load_layer(i, files, weights);
  skipped_ = files.check_all_read();
  parameters_ = files.elements_read();
}

// Adds 1 to the weight of a zero-centred norm.
Vector FamilyModel::zero_centred(Vector weight) const {
  if (config_.family->zero_centred_norms) {
    for (auto& w : weight) w += 1.0F;
  }
  return weight;
}

Vector FamilyModel::load_norm(const std::string& prefix, const Names& names, std::int64_t size,
                              FamilyWeights& files) const {
  if (names.empty()) return {};
  return zero_centred(files.vector(files.first_of(prefix, names, ".weight"), {size}));
}

void FamilyModel::load_layer(std::int64_t index, FamilyWeights& files, WeightType weights) {
  const Family& family = *config_.family;
  const std::string prefix = "layers." + std::to_string(index) + ".";
  const std::int64_t width = config_.hidden_size, inner = config_.intermediate_size;
  Layer layer;
  layer.attends = config_.attends[static_cast<std::size_t>(index)];
  layer.index = std::ranges::count(layers_, layer.attends, &Layer::attends);
  const NormNames& norms = layer.attends ? family.attention_norms : family.delta_norms;
  layer.before_mixer = load_norm(prefix, norms.before_mixer, width, files);
  layer.after_mixer = load_norm(prefix, norms.after_mixer, width, files);
  layer.before_mlp = load_norm(prefix, norms.before_mlp, width, files);
  layer.after_mlp = load_norm(prefix, norms.after_mlp, width, files);
  layer.attends ? load_attention(prefix + "self_attn.", files, weights)
                : load_mixer(prefix + "linear_attn.", files, weights);
  const StoredMatrix gate_up[]{files.matrix(prefix + "mlp.gate_proj.weight", inner, width),
                               files.matrix(prefix + "mlp.up_proj.weight", inner, width)};
  const StoredMatrix down = files.matrix(prefix + "mlp.down_proj.weight", width, inner);
  layer.gate_up = PackedWeight(gate_up, weights);
  layer.down = PackedWeight(std::span(&down, 1), weights);
  layers_.push_back(std::move(layer));
}

void FamilyModel::load_mixer(const std::string& prefix, FamilyWeights& files, WeightType weights) {
  const Family& family = *config_.family;
  const MixerPlan& plan = mixers_.plan();
  const std::int64_t width = config_.hidden_size, heads = plan.config.value_heads;
  DeltaMixers::Layer layer;
  std::vector<StoredMatrix> in;
  auto next = plan.projections.begin();
  for (const auto& [name, count] : family.projections) {
    std::int64_t rows = 0;
    // Step sizes and decays have one row per head: rounding them would save nothing.
    const bool keep = next->columns.first == plan.a.first || next->columns.first == plan.b.first;
    for (int i = 0; i < count; ++i) rows += (next++)->columns.count;
    in.push_back(files.matrix(prefix + std::string(name) + ".weight", rows, width));
    in.back().keep = keep;
  }
  layer.in = PackedWeight(in, weights);
  std::vector<std::string> taps;
  for (const auto name : family.convolutions) taps.push_back(prefix + std::string(name) + ".weight");
  layer.taps = files.taps(taps, plan.channels(), plan.config.conv);
  layer.o_norm = files.vector(prefix + std::string(family.output_norm) + ".weight", {plan.config.value_dim});
  const StoredMatrix out = files.matrix(prefix + std::string(family.output) + ".weight", width, plan.values());
  layer.o_proj = PackedWeight(std::span(&out, 1), weights);
  layer.beta_factor.assign(static_cast<std::size_t>(heads), static_cast<float>(plan.config.beta_scale));
  const DecayRates decay =
      decay_rates(files.vector(prefix + "dt_bias", {heads}), files.vector(prefix + "A_log", {heads}));
  layer.rate = decay.rate;
  layer.dt_bias = decay.bias;
  mixers_.add(std::move(layer));
}

void FamilyModel::load_attention(const std::string& prefix, FamilyWeights& files, WeightType weights) {
  const Family& family = *config_.family;
  const std::int64_t width = config_.hidden_size, dim = config_.head_dim;
  const std::int64_t queries = config_.heads * dim, keys = config_.key_value_heads * dim;
  AttentionLayers::Layer layer;
  const StoredMatrix in[]{files.matrix(prefix + "q_proj.weight", family.gated_attention ? 2 * queries : queries, width),
                          files.matrix(prefix + "k_proj.weight", keys, width),
                          files.matrix(prefix + "v_proj.weight", keys, width)};
  const StoredMatrix out = files.matrix(prefix + "o_proj.weight", width, queries);
  layer.in = PackedWeight(in, weights);
  layer.o_proj = PackedWeight(std::span(&out, 1), weights);
  layer.q_norm = load_norm(prefix, {"q_norm"}, family.norm_per_head ? dim : queries, files);
  layer.k_norm = load_norm(prefix, {"k_norm"}, family.norm_per_head ? dim : keys, files);
  attention_.add(std::move(layer));
}

std::size_t FamilyModel::weight_bytes() const {
  std::size_t total = mixers_.weight_bytes() + attention_.weight_bytes() + head_.bytes() + embeddings_.bytes();
  for (const auto& layer : layers_) total += layer.gate_up.bytes() + layer.down.bytes();
  return total;
}

std::string FamilyModel::fingerprint() const {
  io::Sha256 hash;
  hash.update(io::as_bytes(config_text_));
  for (const auto& name : files_->names()) {
    hash.update(io::as_bytes(name));
    hash.update(files_->file_with(name)->find(name)->bytes);
  }
  return hash.digest();
}

std::vector<StatePart> FamilyModel::state_parts(std::int64_t tokens) const {
  std::vector<std::string> delta, attention;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    (layers_[i].attends ? attention : delta).push_back("layers." + std::to_string(i) + ".");
  }
  auto parts = mixers_.state_parts(delta);
  auto at = mixers_.state_floats();
  const auto open = attention_.pages().open_tokens(tokens);
  const auto floats = static_cast<std::size_t>(open * attention_.pages().token_floats());
  for (const auto& prefix : attention) {
    for (const char* name : {"keys", "values"}) {
      parts.push_back({prefix + name, {1, open, config_.key_value_heads, config_.head_dim}, at, floats});
      at += floats;
    }
  }
  return parts;
}

void FamilyModel::make_slots(std::int64_t slots) {
  states_.emplace(slots, mixers_.state_floats());
  attention_.pages().make_slots(slots);
}

void FamilyModel::clear(std::int64_t slot) {
  std::ranges::fill(states_->slot(slot), 0.0F);
  attention_.pages().clear(slot);
}

void FamilyModel::set(std::int64_t slot, const TextState& state) {
  const std::span<const float> own(*state.own);
  std::ranges::copy(own.first(mixers_.state_floats()), states_->slot(slot).begin());
  attention_.pages().write(slot, state.tokens, state.pages, own.subspan(mixers_.state_floats()));
}

void FamilyModel::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) {
  std::ranges::copy(states_->slot(from), states_->slot(to).begin());
  attention_.pages().copy(from, to, tokens);
}

TextState FamilyModel::state(std::int64_t slot, std::int64_t tokens) {
  const TextPages& pages = attention_.pages();
  const auto constant = mixers_.state_floats();
  std::vector<float> own(constant + static_cast<std::size_t>(pages.open_floats(tokens)));
  std::ranges::copy(states_->slot(slot), own.begin());
  pages.read(slot, tokens, std::span(own).subspan(constant));
  return {tokens, std::make_shared<std::vector<float>>(std::move(own)), pages.full(slot, tokens)};
}

// Replaces the rows x by the MLP's output.
void FamilyModel::apply_mlp(const Layer& layer, const View<float, 2>& x, ThreadPool& pool) {
  const std::int64_t rows = x.extent[0], inner = config_.intermediate_size;
  const View<float, 2> both = inner_.rows(rows, 2 * inner), product = product_.rows(rows, inner);
  layer.gate_up.apply(x, both, pool);
  glu_forward<float>({columns_of(both, {0, inner}), columns_of(both, {inner, inner}), product},
                     {.context = {.pool = &pool}});
  layer.down.apply(product, x, pool);
}

void FamilyModel::advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs,
                          const View<float, 2>& hidden, ThreadPool& pool, std::vector<Draft>* drafts) {
  const std::int64_t rows = std::ssize(ids);
  mixers_.begin(rows, runs, drafts);
  attention_.begin(runs);
  const View<float, 2> x = x_.rows(rows, config_.hidden_size), part = normed_.rows(rows, config_.hidden_size);
  const PackedWeight& embeddings = config_.tied ? head_ : embeddings_;
  for (std::int64_t row = 0; row < rows; ++row) embeddings.copy_row(ids[static_cast<std::size_t>(row)], x.at(row));
  const auto norm_or_copy = [&](const View<float, 2>& from, const Vector& weight) {
    if (!weight.empty()) return norm_rows(from, weight, config_.norm_eps, part, pool);
    if (from.data != part.data) std::copy_n(from.data, from.size(), part.data);
  };
  for (const auto& layer : layers_) {
    norm_or_copy(x, layer.before_mixer);
    layer.attends ? attention_.attend(layer.index, part, part, runs, pool)
                  : mixers_.mix(layer.index, part, part, runs, *states_, pool);
    norm_or_copy(part, layer.after_mixer);
    add_rows(x, part);
    norm_or_copy(x, layer.before_mlp);
    apply_mlp(layer, part, pool);
    norm_or_copy(part, layer.after_mlp);
    add_rows(x, part);
  }
  norm_rows(x, norm_, config_.norm_eps, hidden, pool);
}

// Keys and values of tokens that are not accepted stay in the pages, and are overwritten by the tokens in their place.
void FamilyModel::accept(const Draft& draft, std::int64_t tokens, ThreadPool& pool) {
  mixers_.accept(draft, tokens, *states_, pool);
}

void FamilyModel::logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const {
  head_.apply(hidden, logits, pool);
}

}  // namespace efla::nn
