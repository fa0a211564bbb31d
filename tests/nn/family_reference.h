// A model of a family in float64, token by token and without the kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/family_config.h"

namespace efla::nn {

using Numbers = std::vector<double>;

// Returns the largest difference of logits from the expected ones, relative to the largest of these; NaN if any is NaN.
template <class T>
double worst_difference(const std::vector<T>& got, const Numbers& expected) {
  double worst = 0.0, largest = 0.0;
  EXPECT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    const double difference = std::abs(double(got[i]) - expected[i]);
    if (difference > worst || std::isnan(difference)) worst = difference;
    largest = std::max(largest, std::abs(expected[i]));
  }
  return worst / largest;
}

// The type to which the results of operations are rounded, as by transformers in this type.
enum class Rounding { none, float32, bfloat16 };

class FamilyReference {
 public:
  explicit FamilyReference(const std::filesystem::path& folder, Rounding rounding = Rounding::none)
      : config_(load_family_config(folder)),
        files_(folder),
        olmo_(config_.family->model_type == "olmo_hybrid"),
        rounding_(rounding) {
    for (const auto prefix : {"model.language_model.", "model.", "language_model.model.", "language_model."}) {
      if (prefix_.empty() && files_.file_with(std::string(prefix) + "embed_tokens.weight")) prefix_ = prefix;
    }
  }

  // Returns the logits after every id of a text, row after row.
  Numbers logits(const std::vector<std::int32_t>& ids) const {
    const Numbers head = config_.tied ? tensor({"embed_tokens.weight"}) : whole("lm_head.weight");
    Numbers all;
    for (const auto& row : hidden(ids)) {
      const Numbers logits = product(head, row);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  // Returns the `count` likeliest tokens that the draft head predicts after a text and the id that follows it, each
  // from all tokens before it.
  std::vector<std::int32_t> drafts(std::vector<std::int32_t> ids, std::size_t count) {
    const Numbers embeddings = tensor({"embed_tokens.weight"});
    const Numbers head = config_.tied ? embeddings : whole("lm_head.weight");
    std::vector<Numbers> before = hidden(std::vector(ids.begin(), ids.end() - 1));
    ids.erase(ids.begin());  // the first one has no input of the head before it
    std::vector<std::int32_t> drafted;
    const auto text = std::exchange(prefix_, "mtp.");
    while (drafted.size() < count) {
      std::vector<Numbers> x;
      for (std::size_t t = 0; t < ids.size(); ++t) {
        const auto first = embeddings.begin() + ids[t] * config_.hidden_size;
        Numbers both = norm_of({first, first + config_.hidden_size}, tensor({"pre_fc_norm_embedding.weight"}),
                               config_.norm_eps, true);
        const Numbers last = norm_of(before[t], tensor({"pre_fc_norm_hidden.weight"}), config_.norm_eps, true);
        both.insert(both.end(), last.begin(), last.end());
        x.push_back(product(tensor({"fc.weight"}), both));
      }
      const std::string layer = "layers.0.";
      const Numbers first = tensor({layer + "input_layernorm.weight"});
      add(x, attention(normed(x, first, true), layer + "self_attn."), first, false);
      const Numbers second = tensor({layer + "post_attention_layernorm.weight"});
      std::vector<Numbers> inner;
      for (const auto& row : normed(x, second, true))
        inner.push_back(config_.experts.count > 0 ? experts(row, layer + "mlp.") : mlp(row, layer + "mlp."));
      add(x, inner, second, false);
      before.push_back(norm_of(x.back(), tensor({"norm.weight"}), config_.norm_eps, true));
      const Numbers logits = product(head, before.back());
      ids.push_back(static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      drafted.push_back(ids.back());
    }
    prefix_ = text;
    return drafted;
  }

 private:
  // Returns the inputs of the head after every id of a text.
  std::vector<Numbers> hidden(const std::vector<std::int32_t>& ids) const {
    const auto width = static_cast<std::size_t>(config_.hidden_size);
    const Numbers embeddings = tensor({"embed_tokens.weight"});
    std::vector<Numbers> x;
    for (const auto id : ids) {
      const auto first = embeddings.begin() + id * config_.hidden_size;
      x.emplace_back(first, first + static_cast<std::ptrdiff_t>(width));
    }
    for (std::int64_t i = 0; i < config_.layers(); ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      const bool attends = config_.attends[static_cast<std::size_t>(i)], after = olmo_ && attends;
      const Numbers first =
          tensor({layer + "input_layernorm.weight", layer + "attention_layer_norm.weight",
                  layer + "post_attention_layernorm.weight", layer + "feedforward_layer_norm.weight"});
      const Numbers second =
          after ? tensor({layer + "post_feedforward_layernorm.weight"})
                : tensor({layer + "post_attention_layernorm.weight", layer + "feedforward_layer_norm.weight"});
      add(x, mixed(normed(x, first, !after), layer, attends), first, after);
      std::vector<Numbers> inner;
      for (const auto& row : normed(x, second, !after))
        inner.push_back(config_.sparse[static_cast<std::size_t>(i)] ? experts(row, layer + "mlp.")
                                                                    : mlp(row, layer + "mlp."));
      add(x, inner, second, after);
    }
    const Numbers norm = tensor({"norm.weight"});
    for (auto& row : x) row = norm_of(row, norm, config_.norm_eps, !olmo_);
    return x;
  }

  double rounded(double x) const {
    if (rounding_ == Rounding::none) return x;
    const auto narrow = static_cast<float>(x);
    return static_cast<double>(rounding_ == Rounding::float32 ? narrow : to_float(to_bfloat16(narrow)));
  }
  Numbers rounded(Numbers x) const {
    for (auto& number : x) number = rounded(number);
    return x;
  }
  static double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

  Numbers whole(const std::string& name) const {
    const auto* file = files_.file_with(name);
    if (file == nullptr) return {};
    const auto& from = *file->find(name);
    Numbers numbers;
    if (from.type == io::TensorType::BF16) {
      for (std::size_t i = 0; i < from.bytes.size(); i += 2) {
        numbers.push_back(to_float(bfloat16(static_cast<std::uint16_t>(from.bytes[i] | from.bytes[i + 1] << 8))));
      }
      return numbers;
    }
    std::vector<float> narrow(from.bytes.size() / sizeof(float));
    std::memcpy(narrow.data(), from.bytes.data(), from.bytes.size());
    return {narrow.begin(), narrow.end()};
  }
  // Returns the first tensor that the folder has.
  Numbers tensor(std::initializer_list<std::string> names) const {
    for (const auto& name : names) {
      if (auto numbers = whole(prefix_ + name); !numbers.empty()) return numbers;
    }
    return {};
  }

  Numbers product(const Numbers& weight, const Numbers& x) const {
    Numbers y(weight.size() / x.size());
    for (std::size_t n = 0; n < y.size(); ++n) {
      for (std::size_t d = 0; d < x.size(); ++d) y[n] += weight[n * x.size() + d] * x[d];
    }
    return rounded(y);
  }
  // Normalises parts of the length of the weight.
  Numbers norm_of(Numbers x, const Numbers& weight, double eps, bool zero_centred) const {
    const std::size_t dim = weight.size();
    for (std::size_t first = 0; first < x.size(); first += dim) {
      double squares = 0.0;
      for (std::size_t i = 0; i < dim; ++i) squares += x[first + i] * x[first + i];
      const double r = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
      for (std::size_t i = 0; i < dim; ++i) x[first + i] *= r * (weight[i] + (zero_centred ? 1.0 : 0.0));
    }
    return rounded(x);
  }
  std::vector<Numbers> normed(std::vector<Numbers> x, const Numbers& weight, bool wanted) const {
    for (auto& row : x) {
      if (wanted) row = norm_of(row, weight, config_.norm_eps, !olmo_);
    }
    return x;
  }
  void add(std::vector<Numbers>& to, const std::vector<Numbers>& x, const Numbers& weight, bool norm) const {
    const auto rows = normed(x, weight, norm);
    for (std::size_t t = 0; t < to.size(); ++t) {
      for (std::size_t d = 0; d < to[t].size(); ++d) to[t][d] = rounded(to[t][d] + rows[t][d]);
    }
  }

  Numbers mlp(const Numbers& x, const std::string& layer) const {
    Numbers both = product(tensor({layer + "gate_proj.weight"}), x);
    const Numbers up = product(tensor({layer + "up_proj.weight"}), x);
    both.insert(both.end(), up.begin(), up.end());
    return swiglu(both, tensor({layer + "down_proj.weight"}));
  }
  Numbers swiglu(const Numbers& both, const Numbers& down) const {
    Numbers inner(both.size() / 2);
    for (std::size_t i = 0; i < inner.size(); ++i) {
      inner[i] = rounded(rounded(both[i] * sigmoid_of(both[i])) * both[inner.size() + i]);
    }
    return product(down, inner);
  }

  Numbers experts(const Numbers& x, const std::string& layer) const {
    Numbers p = product(tensor({layer + "gate.weight"}), x);
    for (auto& score : p) score = std::exp(score);
    double sum = 0.0;
    for (const double score : p) sum += score;
    Numbers sorted = p;
    std::ranges::sort(sorted, std::greater());
    sorted.resize(static_cast<std::size_t>(config_.experts.per_token));
    if (config_.experts.normalised) sum = std::accumulate(sorted.begin(), sorted.end(), 0.0);
    Numbers y = mlp(x, layer + "shared_expert.");
    for (auto& number : y) number *= sigmoid_of(product(tensor({layer + "shared_expert_gate.weight"}), x)[0]);
    for (std::size_t e = 0; e < p.size(); ++e) {
      if (p[e] < sorted.back()) continue;
      const Numbers own = expert(x, layer + "experts.", e);
      for (std::size_t i = 0; i < y.size(); ++i) y[i] += p[e] / sum * own[i];
    }
    return rounded(y);
  }
  Numbers expert(const Numbers& x, const std::string& layer, std::size_t e) const {
    const Numbers all = tensor({layer + "gate_up_proj"}), down = tensor({layer + "down_proj"});
    if (all.empty()) return mlp(x, layer + std::to_string(e) + ".");
    const auto part = [&](const Numbers& from) {
      const auto size = static_cast<std::ptrdiff_t>(from.size() / static_cast<std::size_t>(config_.experts.count));
      const auto first = from.begin() + static_cast<std::ptrdiff_t>(e) * size;
      return Numbers(first, first + size);
    };
    return swiglu(product(part(all), x), part(down));
  }

  std::vector<Numbers> mixed(const std::vector<Numbers>& x, const std::string& layer, bool attends) const {
    return attends ? attention(x, layer + "self_attn.") : delta(x, layer + "linear_attn.");
  }

  void rotate(Numbers& heads, std::size_t position) const {
    const auto dim = static_cast<std::size_t>(config_.head_dim), half = static_cast<std::size_t>(config_.rotary / 2);
    for (std::size_t first = 0; first < heads.size(); first += dim) {
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) *
                             std::pow(config_.rope_theta, -static_cast<double>(i) / static_cast<double>(half));
        const double a = heads[first + i], b = heads[first + half + i];
        heads[first + i] = rounded(a * std::cos(angle) - b * std::sin(angle));
        heads[first + half + i] = rounded(b * std::cos(angle) + a * std::sin(angle));
      }
    }
  }

  std::vector<Numbers> attention(const std::vector<Numbers>& x, const std::string& layer) const {
    const auto heads = static_cast<std::size_t>(config_.heads), dim = static_cast<std::size_t>(config_.head_dim);
    const std::size_t group = heads / static_cast<std::size_t>(config_.key_value_heads);
    const Numbers q_proj = tensor({layer + "q_proj.weight"}), k_proj = tensor({layer + "k_proj.weight"});
    const Numbers v_proj = tensor({layer + "v_proj.weight"}), o_proj = tensor({layer + "o_proj.weight"});
    const Numbers q_norm = tensor({layer + "q_norm.weight"}), k_norm = tensor({layer + "k_norm.weight"});
    std::vector<Numbers> keys, values, out;
    for (std::size_t t = 0; t < x.size(); ++t) {
      const Numbers queries = product(q_proj, x[t]);
      Numbers q, gate;
      for (std::size_t i = 0; i < queries.size(); ++i) (!olmo_ && i / dim % 2 == 1 ? gate : q).push_back(queries[i]);
      q = norm_of(q, q_norm, config_.norm_eps, !olmo_);
      keys.push_back(norm_of(product(k_proj, x[t]), k_norm, config_.norm_eps, !olmo_));
      values.push_back(product(v_proj, x[t]));
      rotate(q, t);
      rotate(keys.back(), t);
      Numbers o(heads * dim);
      for (std::size_t h = 0; h < heads; ++h) {
        Numbers weights;
        double sum = 0.0;
        for (std::size_t s = 0; s <= t; ++s) {
          double score = 0.0;
          for (std::size_t i = 0; i < dim; ++i) score += q[h * dim + i] * keys[s][h / group * dim + i];
          weights.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
          sum += weights.back();
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < dim; ++i) o[h * dim + i] += weights[s] / sum * values[s][h / group * dim + i];
        }
      }
      for (std::size_t i = 0; i < gate.size(); ++i) o[i] = rounded(o[i]) * rounded(sigmoid_of(gate[i]));
      out.push_back(product(o_proj, rounded(o)));
    }
    return out;
  }

  std::vector<Numbers> delta(const std::vector<Numbers>& x, const std::string& layer) const {
    const auto& m = config_.mixer;
    const auto H = static_cast<std::size_t>(m.heads), HV = static_cast<std::size_t>(m.value_heads);
    const auto K = static_cast<std::size_t>(m.key_dim), V = static_cast<std::size_t>(m.value_dim);
    const auto W = static_cast<std::size_t>(m.conv), channels = 2 * H * K + HV * V;
    const auto joined = [&](std::initializer_list<const char*> names) {
      Numbers all;
      for (const char* name : names) {
        const Numbers one = tensor({layer + name});
        all.insert(all.end(), one.begin(), one.end());
      }
      return all;
    };
    const auto group = HV / H;
    // Returns rows `first` to `first + rows` of each key head of a packed weight.
    const auto unpacked = [&](const char* name, std::size_t first, std::size_t rows) {
      const Numbers all = joined({name});
      const std::size_t row = x[0].size(), head = all.size() / H;
      Numbers own;
      for (std::size_t h = 0; h < H && !all.empty(); ++h) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(h * head + first * row);
        own.insert(own.end(), begin, begin + static_cast<std::ptrdiff_t>(rows * row));
      }
      return own;
    };
    const auto or_packed = [](Numbers own, std::initializer_list<Numbers> packed) {
      for (const auto& part : packed) own.insert(own.end(), part.begin(), part.end());
      return own;
    };
    const char *qkvz = "in_proj_qkvz.weight", *ba = "in_proj_ba.weight";
    const Numbers in = or_packed(joined({"in_proj_qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight"}),
                                 {unpacked(qkvz, 0, K), unpacked(qkvz, K, K), unpacked(qkvz, 2 * K, group * V)});
    const Numbers taps = joined({"conv1d.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"});
    const Numbers b_proj = or_packed(joined({"in_proj_b.weight", "b_proj.weight"}), {unpacked(ba, 0, group)});
    const Numbers a_proj = or_packed(joined({"in_proj_a.weight", "a_proj.weight"}), {unpacked(ba, group, group)});
    const Numbers z_proj =
        or_packed(joined({"in_proj_z.weight", "g_proj.weight"}), {unpacked(qkvz, 2 * K + group * V, group * V)});
    const Numbers norm = joined({"norm.weight", "o_norm.weight"}), out = joined({"out_proj.weight", "o_proj.weight"});
    const Numbers a_log = joined({"A_log"}), dt_bias = joined({"dt_bias"});
    std::vector<Numbers> inputs, outputs;
    Numbers state(HV * K * V);
    for (const auto& row : x) {
      inputs.push_back(product(in, row));
      Numbers c(channels);
      for (std::size_t i = 0; i < channels; ++i) {
        for (std::size_t j = 0; j < W && j < inputs.size(); ++j)
          c[i] += taps[i * W + W - 1 - j] * inputs[inputs.size() - 1 - j][i];
        c[i] = rounded(c[i] * sigmoid_of(c[i]));
      }
      for (std::size_t first = 0; first < 2 * H * K; first += K) {  // heads of q and k
        double squares = 1e-6;
        for (std::size_t i = 0; i < K; ++i) squares += c[first + i] * c[first + i];
        const double scale = first < H * K ? 1.0 / std::sqrt(static_cast<double>(K)) : 1.0;
        for (std::size_t i = 0; i < K; ++i) c[first + i] *= scale / std::sqrt(squares);
      }
      const Numbers a = product(a_proj, row), b = product(b_proj, row), z = product(z_proj, row);
      Numbers o(HV * V);
      for (std::size_t h = 0; h < HV; ++h) {
        const double decay = std::exp(-std::exp(a_log[h]) * std::log1p(std::exp(a[h] + dt_bias[h])));
        const double beta = rounded(m.beta_scale * sigmoid_of(b[h]));
        const double *q = &c[h / (HV / H) * K], *k = q + H * K, *v = &c[2 * H * K + h * V];
        for (std::size_t j = 0; j < V; ++j) {
          double* column = &state[h * K * V + j];
          double seen = 0.0;
          for (std::size_t i = 0; i < K; ++i) seen += (column[i * V] *= decay) * k[i];
          for (std::size_t i = 0; i < K; ++i) column[i * V] += k[i] * beta * (v[j] - seen);
          for (std::size_t i = 0; i < K; ++i) o[h * V + j] += column[i * V] * q[i];
        }
      }
      o = norm_of(rounded(o), norm, olmo_ ? 1e-5 : config_.norm_eps, false);
      for (std::size_t i = 0; i < o.size(); ++i) o[i] = rounded(o[i] * z[i] * sigmoid_of(z[i]));
      outputs.push_back(product(out, o));
    }
    return outputs;
  }

  FamilyConfig config_;
  io::SafetensorsFolder files_;
  bool olmo_;
  Rounding rounding_;
  std::string prefix_;
};

}  // namespace efla::nn
