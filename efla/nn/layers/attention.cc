#include "efla/nn/layers/attention.h"

#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>
#include <torch/types.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "efla/autograd/layers/linear.h"
#include "efla/base/check.h"

namespace efla::nn {
namespace {

using torch::Tensor;

// Queries per block. Blocks bound the memory for scores, and a block skips the keys after its last query.
constexpr std::int64_t kQueries = 256;

// Tokens for which a cache has room at least, because a CUDA graph is captured for every capacity.
constexpr std::int64_t kLeastRoom = 256;

#if TORCH_VERSION_MAJOR >= 2
// Returns k or v [B, HKV, S, E] with one head per query head of q [B, H, T, E], in the type of q.
Tensor of_query_heads(const Tensor& t, const Tensor& q) {
  return (t.size(1) == q.size(1) ? t : t.repeat_interleave(q.size(1) / t.size(1), 1)).to(q.scalar_type());
}

// Computes causal_attention by LibTorch's fused kernels for GPUs, which do not store the scores. Requires S = T or T
// = 1.
Tensor fused_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  return at::scaled_dot_product_attention(q, of_query_heads(k, q), of_query_heads(v, q), {}, 0.0,
                                          q.size(2) == k.size(2));
}

// Returns the attention to all keys, or with `causal` and S = T to those up to each query, and the logarithms of the
// sums of exponentials of the scores [B, H, T].
std::pair<Tensor, Tensor> attention_part(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  if (q.scalar_type() == torch::kBFloat16) {
    const auto part = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, causal);
    return {std::get<0>(part), std::get<1>(part)};
  }
  const auto part = at::_scaled_dot_product_efficient_attention(q, k, v, {}, /*compute_log_sumexp=*/true, 0.0, causal);
  return {std::get<0>(part), std::get<1>(part).narrow(2, 0, q.size(2))};
}

// Whether attention_part takes heads of this size.
bool takes_parts(const Tensor& q) {
  constexpr std::int64_t kPiece = 8, kMostDim = 256;
  return q.is_cuda() && q.size(3) % kPiece == 0 && q.size(3) <= kMostDim;
}

// Computes causal_attention by the same kernels for S > T: as the attention to earlier tokens and to the queries' own,
// weighted by their sums of exponentials.
Tensor attention_of_parts(const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::int64_t tokens = q.size(2), before = k.size(2) - tokens;
  const Tensor keys = of_query_heads(k, q), values = of_query_heads(v, q);
  const auto [earlier, earlier_sum] = attention_part(q, keys.narrow(2, 0, before), values.narrow(2, 0, before), false);
  const auto [own, own_sum] = attention_part(q, keys.narrow(2, before, tokens), values.narrow(2, before, tokens), true);
  const Tensor weight = torch::sigmoid(earlier_sum - own_sum).unsqueeze(-1);  // of the earlier tokens
  return torch::lerp(own.to(torch::kFloat), earlier.to(torch::kFloat), weight).to(q.scalar_type());
}
#endif

// Writes a token [B, HKV, 1, D/H] to a slot [1] of keys or values. If LibTorch's operators must be reproducible,
// index_copy_ sorts the indices on a GPU by many kernels, because equal indices would race. One index has no equal.
void write_slot(Tensor slots, const Tensor& slot, const Tensor& token) {
  at::Context& context = at::globalContext();
  const bool reproducible = context.deterministicAlgorithms(), warns = context.deterministicAlgorithmsWarnOnly();
  const auto restore = c10::make_scope_exit([&] { context.setDeterministicAlgorithms(reproducible, warns); });
  context.setDeterministicAlgorithms(false, warns);
  slots.index_copy_(2, slot, token);
}

}  // namespace

Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::int64_t tokens = q.size(2), before = k.size(2) - tokens, key_value_heads = k.size(1);
#if TORCH_VERSION_MAJOR >= 2
  if (q.is_cuda() && (before == 0 || tokens == 1)) return fused_attention(q, k, v);
  if (takes_parts(q)) return attention_of_parts(q, k, v);
#endif
  const auto grouped = q.unflatten(1, {key_value_heads, q.size(1) / key_value_heads});  // [B, HKV, G, T, E]
  const auto keys = k.unsqueeze(2), values = v.unsqueeze(2);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  std::vector<Tensor> parts;
  for (std::int64_t begin = 0; begin < tokens; begin += kQueries) {
    const std::int64_t count = std::min(kQueries, tokens - begin), seen = before + begin + count;
    const auto scores =
        torch::matmul(grouped.narrow(3, begin, count) * scale, keys.narrow(3, 0, seen).transpose(-1, -2));
    const auto future = torch::ones({count, seen}, scores.options().dtype(torch::kBool)).triu(seen - count + 1);
    const auto weights = torch::softmax(scores.masked_fill(future, -INFINITY), -1);
    parts.push_back(torch::matmul(weights, values.narrow(3, 0, seen)));
  }
  return torch::cat(parts, 3).flatten(1, 2);
}

void validate(const AttentionConfig& config) {
  const Require require("attention");
  require(config.hidden >= 1, "hidden", config.hidden, "a positive width");
  require(config.heads >= 1 && config.hidden % (2 * config.heads) == 0, "heads", config.heads,
          "a number whose double divides hidden, " + std::to_string(config.hidden));
  require(config.key_value_heads >= 1 && config.heads % config.key_value_heads == 0, "key_value_heads",
          config.key_value_heads, "a divisor of heads, " + std::to_string(config.heads));
  require(config.rope_theta > 1.0 && std::isfinite(config.rope_theta), "rope_theta", config.rope_theta,
          "a number above 1");
}

KeyValueCache::KeyValueCache(std::int64_t batch, std::int64_t key_value_heads, std::int64_t dim, torch::Device device)
    : keys_(torch::empty({batch, key_value_heads, 0, dim}, device)), values_(torch::empty_like(keys_)) {}

void KeyValueCache::append(const Tensor& keys, const Tensor& values) {
  const std::int64_t added = keys.size(2);
  reserve(added);
  keys_.narrow(2, tokens_, added).copy_(keys);
  values_.narrow(2, tokens_, added).copy_(values);
  tokens_ += added;
}

void KeyValueCache::reserve(std::int64_t tokens) {
  if (tokens_ + tokens <= keys_.size(2)) return;
  const std::int64_t room = std::max({tokens_ + tokens, 2 * tokens_, kLeastRoom});
  for (auto* held : {&keys_, &values_}) {
    const auto larger = torch::zeros({held->size(0), held->size(1), room, held->size(3)}, held->options());
    larger.narrow(2, 0, tokens_).copy_(held->narrow(2, 0, tokens_));
    *held = larger;
  }
}

KeyValueCache KeyValueCache::joined(const std::vector<const KeyValueCache*>& caches) {
  std::int64_t batch = 0, tokens = 0;
  for (const auto* cache : caches) {
    batch += cache->keys_.size(0);
    tokens = std::max(tokens, cache->tokens_);
  }
  const Tensor& like = caches.at(0)->keys_;
  KeyValueCache all(batch, like.size(1), like.size(3), like.device());
  all.reserve(tokens);
  std::int64_t row = 0;
  for (const auto* cache : caches) {
    const std::int64_t rows = cache->keys_.size(0), start = tokens - cache->tokens_;
    all.keys_.narrow(0, row, rows).narrow(2, start, cache->tokens_).copy_(cache->keys());
    all.values_.narrow(0, row, rows).narrow(2, start, cache->tokens_).copy_(cache->values());
    row += rows;
  }
  all.tokens_ = tokens;
  return all;
}

KeyValueCache KeyValueCache::selected(const Tensor& rows) const {
  KeyValueCache some = *this;
  some.keys_ = keys_.index_select(0, rows);
  some.values_ = values_.index_select(0, rows);
  return some;
}

Rotation::Rotation(const Tensor& positions, std::int64_t dim, double theta, torch::ScalarType dtype) {
  const std::int64_t half = dim / 2;
  const auto exponents =
      torch::arange(half, positions.options().dtype(torch::kDouble)) * (-std::log(theta) / static_cast<double>(half));
  const auto angles = positions.to(torch::kDouble).unsqueeze(-1) * exponents.exp();  // [..., T, E/2]
  const auto cos = angles.cos(), sin = angles.sin();
  cos_ = torch::cat({cos, cos}, -1).to(dtype);
  sin_ = torch::cat({-sin, sin}, -1).to(dtype);
}

Tensor Rotation::operator()(const Tensor& x) const {
  return torch::addcmul(x * cos_, torch::roll(x, cos_.size(-1) / 2, -1), sin_);
}

AttentionStep::AttentionStep(const AttentionConfig& config, const Tensor& token_slot, const Tensor& starts,
                             std::int64_t capacity)
    : slot(token_slot),
      rotated(starts.defined() ? (slot - starts).view({-1, 1, 1}) : slot, config.hidden / config.heads,
              config.rope_theta, torch::kFloat) {
  const auto slots = torch::arange(capacity, slot.options());
  Tensor empty = (slots > slot).view({1, 1, capacity});
  if (starts.defined()) {
    empty = empty.logical_or(slots < starts.view({-1, 1, 1})).repeat({1, config.key_value_heads, 1});
    empty = empty.view({-1, 1, capacity});
  }
  mask = torch::zeros_like(empty, torch::kFloat).masked_fill(empty, -INFINITY);
}

Tensor attend_one(const AttentionConfig& config, const AttentionStep& step, const Tensor& qkv,
                  const KeyValueCache& cache) {
  const std::int64_t dim = config.hidden / config.heads, batch = qkv.size(0), key_heads = config.key_value_heads;
  const auto heads = qkv.view({batch, config.heads + 2 * key_heads, 1, dim});
  const auto rotated = step.rotated(heads.narrow(1, 0, config.heads + key_heads));
  const Tensor keys = cache.key_slots(), values = cache.value_slots();
  write_slot(keys, step.slot, rotated.narrow(1, config.heads, key_heads));
  write_slot(values, step.slot, heads.narrow(1, config.heads + key_heads, key_heads));
  const auto q = rotated.narrow(1, 0, config.heads).reshape({batch * key_heads, config.heads / key_heads, dim});
  const auto scores = torch::baddbmm(step.mask, q, keys.flatten(0, 1).transpose(1, 2), /*beta=*/1.0,
                                     1.0 / std::sqrt(static_cast<double>(dim)));
  return torch::bmm(torch::softmax(scores, -1), values.flatten(0, 1)).reshape({batch, config.hidden});
}

Attention::Attention(const AttentionConfig& config, const Initialiser& init) : config_((validate(config), config)) {
  const std::int64_t width = config.hidden, key_values = width / config.heads * config.key_value_heads;
  const auto add = [&](const char* name, std::int64_t out) {
    return register_module(name, std::make_shared<Weight>(linear_weight(init.within(name), out, width)));
  };
  q_proj_ = add("q_proj", width);
  k_proj_ = add("k_proj", key_values);
  v_proj_ = add("v_proj", key_values);
  o_proj_ = add("o_proj", width);
}

Attention::Heads Attention::heads_of(const Tensor& x, const Tensor& positions) const {
  const std::int64_t dim = config_.hidden / config_.heads;
  const auto split = [&](const Tensor& weight) {
    return autograd::linear(x, weight).unflatten(2, {-1, dim}).transpose(1, 2);
  };
  const auto q = split(q_proj_->value), k = split(k_proj_->value);
  const Rotation rotated(positions.to(x.device()), dim, config_.rope_theta, q.scalar_type());
  return {rotated(q), rotated(k), split(v_proj_->value)};
}

Tensor Attention::output(const Tensor& o) const {
  return autograd::linear(o.transpose(1, 2).flatten(2), o_proj_->value);
}

Tensor Attention::forward(const Tensor& x, const Tensor& cu_seqlens) const {
  std::vector<std::int64_t> lengths{x.size(1)};
  if (cu_seqlens.defined()) {
    const auto given = cu_seqlens.diff().to(torch::kCPU).contiguous();
    lengths.assign(given.data_ptr<std::int64_t>(), given.data_ptr<std::int64_t>() + given.numel());
  }
  std::vector<Tensor> positions, parts;
  for (const auto length : lengths) positions.push_back(torch::arange(length));
  const auto [q, k, v] = heads_of(x, torch::cat(positions));
  // Not slices: the gradient of each slice would be a tensor of all tokens.
  const auto queries = q.split_with_sizes(lengths, 2), keys = k.split_with_sizes(lengths, 2),
             values = v.split_with_sizes(lengths, 2);
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    if (lengths[n] > 0) parts.push_back(causal_attention(queries[n], keys[n], values[n]));
  }
  return output(torch::cat(parts, 2));
}

KeyValueCache Attention::initial_cache(std::int64_t batch) const {
  return {batch, config_.key_value_heads, config_.hidden / config_.heads, q_proj_->value.device()};
}

Tensor Attention::forward(const Tensor& x, KeyValueCache& cache) const {
  const torch::NoGradGuard no_grad;
  const auto [q, k, v] = heads_of(
      x, torch::arange(cache.tokens(), cache.tokens() + x.size(1), torch::device(x.device()).dtype(torch::kLong)));
  cache.append(k, v);
  return output(causal_attention(q, cache.keys(), cache.values()));
}

}  // namespace efla::nn
