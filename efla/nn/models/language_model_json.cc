#include "efla/nn/models/language_model_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/io/fields.h"
#include "efla/nn/models/config_fields.h"
#include "efla/rule/validate.h"

namespace efla::nn {
namespace {

using io::Fields;
using nlohmann::json;

// Reads {"layers": […], "num_heads": n, "num_kv_heads": n, "rope_theta": x}, or a list with one such object.
void read_attention(const Fields& outer, const json& given, LanguageModelConfig& config) {
  const json& object = given.is_array() && given.size() == 1 ? given.front() : given;
  const Fields fields = outer.within("attn", object);
  fields.read("layers", config.attention_layers);
  fields.read("num_heads", config.attention_heads);
  fields.read("num_kv_heads", config.attention_kv_heads);
  fields.read("rope_theta", config.rope_theta);
  allow_values(fields, "qkv_bias", {false, nullptr});
  allow_values(fields, "qk_norm", {false, nullptr});
  allow_values(fields, "window_size", {nullptr});
  fields.refuse_others();
}

// Reads the fields that all model types share.
void read_common(const Fields& fields, LanguageModelConfig& config) {
  fields.read("vocab_size", config.vocab_size);
  fields.read("hidden_size", config.hidden_size);
  fields.read("num_hidden_layers", config.num_hidden_layers);
  fields.read("num_heads", config.num_heads);
  fields.read("expand_v", config.expand_v);
  fields.read("use_short_conv", config.use_short_conv);
  fields.read("conv_size", config.conv_size);
  fields.read("allow_neg_eigval", config.allow_neg_eigval);
  fields.read("hidden_ratio", config.hidden_ratio);
  fields.read("intermediate_size", config.intermediate_size);
  fields.read("norm_eps", config.norm_eps);
  fields.read("tie_word_embeddings", config.tie_word_embeddings);
  fields.read("initializer_range", config.initializer_range);
  fields.read("bos_token_id", config.bos_token_id);
  read_eos_token_id(fields, config.eos_token_id);
  fields.read("pad_token_id", config.pad_token_id);
  if (config.pad_token_id == -1) config.pad_token_id.reset();  // as many configurations write none
  if (const json* attention = fields.find("attn")) read_attention(fields, *attention, config);
}

// Reads the fields of the model type efla that are not among the common fields.
void read_efla(const Fields& fields, LanguageModelConfig& config) {
  fields.read("mixer", config.mixer);
  fields.read("num_v_heads", config.num_v_heads);
  fields.read("head_dim", config.head_dim);
  fields.read("expand_k", config.expand_k);
  fields.read("use_gate", config.use_gate);
  fields.read("use_beta", config.use_beta);
  fields.read("use_output_norm", config.use_output_norm);
  fields.read("qk_norm", config.qk_norm);
  fields.read("qk_activation", config.qk_activation);
  fields.read("safe_gate", config.safe_gate);
  fields.read("lower_bound", config.lower_bound);
  fields.read("num_householder", config.num_householder);
  fields.read("decay_low_rank_dim", config.decay_low_rank_dim);
  fields.read("a_low_rank_dim", config.a_low_rank_dim);
  fields.read("v_low_rank_dim", config.v_low_rank_dim);
  fields.read("gate_low_rank_dim", config.gate_low_rank_dim);
}

LanguageModelConfig read_delta_net(const Fields& fields) {
  LanguageModelConfig config{.mixer = "deltanet", .use_gate = false};
  read_common(fields, config);
  fields.read("expand_k", config.expand_k);
  fields.read("use_gate", config.use_gate);
  fields.read("use_beta", config.use_beta);
  fields.read("qk_norm", config.qk_norm);
  fields.read("qk_activation", config.qk_activation);
  allow_values(fields, "use_output_norm", {true});
  return config;
}

LanguageModelConfig read_gated_deltanet(const Fields& fields) {
  LanguageModelConfig config{.mixer = "gdn", .num_hidden_layers = 21, .num_heads = 6, .head_dim = 256};
  config.expand_v = 2.0;
  config.use_gate = true;
  read_common(fields, config);
  fields.read("head_dim", config.head_dim);
  fields.read("num_v_heads", config.num_v_heads);
  fields.read("use_gate", config.use_gate);
  allow_values(fields, "output_gate_activation", {"swish", "silu"});
  return config;
}

LanguageModelConfig read_kda(const Fields& fields) {
  LanguageModelConfig config{.mixer = "kda", .head_dim = 128};
  config.use_gate = true;
  read_common(fields, config);
  fields.read("head_dim", config.head_dim);
  fields.read("num_v_heads", config.num_v_heads);
  fields.read("safe_gate", config.safe_gate);
  fields.read("lower_bound", config.lower_bound);
  if (config.safe_gate && !config.lower_bound) {
    fields.refuse("lower_bound", "a number in [-5, 0), as safe_gate is true");
  }
  return config;
}

LanguageModelConfig read_comba(const Fields& fields) {
  LanguageModelConfig config{.mixer = "comba", .num_hidden_layers = 21, .num_heads = 6, .head_dim = 256};
  config.expand_v = 2.0;
  config.use_gate = true;
  read_common(fields, config);
  fields.read("head_dim", config.head_dim);
  fields.read("num_v_heads", config.num_v_heads);
  fields.read("use_output_gate", config.use_gate);
  allow_values(fields, "use_output_correction", {true});
  allow_values(fields, "use_inner_decay", {true});
  fields.find("correction_factor");  // the initial value of D
  return config;
}

LanguageModelConfig read_gated_deltaproduct(const Fields& fields) {
  LanguageModelConfig config{.mixer = "deltaproduct", .num_hidden_layers = 21, .num_heads = 6, .head_dim = 256};
  config.expand_v = 2.0;
  config.use_gate = true;
  config.num_householder = 1;
  read_common(fields, config);
  fields.read("head_dim", config.head_dim);
  fields.read("use_output_gate", config.use_gate);
  fields.read("num_householder", config.num_householder);
  bool has_decay = false;
  fields.read("use_forget_gate", has_decay);
  if (has_decay) config.mixer = "gated-deltaproduct";
  return config;
}

json optional_json(const auto& value) { return value ? json(*value) : json(nullptr); }

json eos_json(const std::vector<std::int64_t>& ids) {
  if (ids.empty()) return nullptr;
  return ids.size() == 1 ? json(ids[0]) : json(ids);
}

json common_json(const LanguageModelConfig& c) {
  json out{{"vocab_size", c.vocab_size},
           {"hidden_size", c.hidden_size},
           {"num_hidden_layers", c.num_hidden_layers},
           {"num_heads", c.num_heads},
           {"use_short_conv", c.use_short_conv},
           {"conv_size", c.conv_size},
           {"allow_neg_eigval", c.allow_neg_eigval},
           {"hidden_ratio", c.hidden_ratio},
           {"intermediate_size", c.intermediate_size > 0 ? json(c.intermediate_size) : json(nullptr)},
           {"hidden_act", "swish"},
           {"norm_eps", c.norm_eps},
           {"tie_word_embeddings", c.tie_word_embeddings},
           {"initializer_range", c.initializer_range},
           {"bos_token_id", optional_json(c.bos_token_id)},
           {"eos_token_id", eos_json(c.eos_token_id)},
           {"pad_token_id", optional_json(c.pad_token_id)},
           {"dtype", "float32"},
           {"attn", nullptr}};
  const auto attention = c.attention_config();
  if (c.has_attention()) {
    out["attn"] = {{"layers", c.attention_layers},
                   {"num_heads", attention.heads},
                   {"num_kv_heads", attention.key_value_heads},
                   {"rope_theta", attention.rope_theta}};
  }
  return out;
}

// Returns whether int(unit · (size / unit)), as flash-linear-attention computes sizes, equals the size.
bool is_product(double unit, std::int64_t size) {
  return static_cast<std::int64_t>(unit * (static_cast<double>(size) / unit)) == size;
}

// Returns flash-linear-attention's model type if it has a model with this mixer and these parts, otherwise "efla".
const char* model_type_of(const LanguageModelConfig& c, const MixerConfig& mixer) {
  const bool gated = mixer.output_gate != OutputGate::none;
  const bool plain = c.use_beta && c.use_output_norm && c.qk_activation == "silu" && c.qk_norm != "sum";
  const bool grouped = c.num_v_heads > 0 && c.num_v_heads != c.num_heads;
  const auto width = static_cast<double>(c.hidden_size);
  if (c.mixer == "deltanet" && c.use_output_norm && !grouped && is_product(width, mixer.key_dim * c.num_heads) &&
      is_product(width, mixer.value_dim * c.num_heads)) {
    return "delta_net";
  }
  if (plain && is_product(static_cast<double>(mixer.key_dim), mixer.value_dim)) {
    if (c.mixer == "gdn") return "gated_deltanet";
    if (c.mixer == "kda" && gated) return "kda";
    if (c.mixer == "comba" && !c.allow_neg_eigval) return "comba";
    if ((c.mixer == "deltaproduct" || c.mixer == "gated-deltaproduct") && !grouped) return "gated_deltaproduct";
  }
  return "efla";
}

const std::vector<std::pair<const char*, LanguageModelConfig>>& presets() {
  const auto sized = [](std::int64_t vocabulary, std::int64_t width, std::int64_t layers, std::int64_t head_dim) {
    LanguageModelConfig config{.vocab_size = vocabulary, .hidden_size = width, .num_hidden_layers = layers};
    config.num_heads = width / head_dim;
    config.tie_word_embeddings = true;
    return config;
  };
  auto bytes = sized(258, 128, 4, 64);  // the ids of data::load_tokenizer("bytes")
  bytes.bos_token_id = 256;
  bytes.eos_token_id = {257};
  auto large = sized(32000, 2048, 24, 128);
  large.tie_word_embeddings = false;
  static const std::vector<std::pair<const char*, LanguageModelConfig>> all{
      {"efla-1m", bytes},
      {"efla-20m", sized(8192, 384, 10, 64)},
      {"efla-340m", sized(32000, 1024, 24, 128)},
      {"efla-1.3b", large},
  };
  return all;
}

// Adds the fields of the model type efla.
void add_efla_fields(const LanguageModelConfig& c, json& out) {
  out["mixer"] = c.mixer;
  out["num_v_heads"] = c.num_v_heads > 0 ? json(c.num_v_heads) : json(nullptr);
  out["head_dim"] = c.head_dim > 0 ? json(c.head_dim) : json(nullptr);
  out["expand_k"] = c.expand_k;
  out["expand_v"] = c.expand_v;
  out["use_gate"] = optional_json(c.use_gate);
  out["use_beta"] = c.use_beta;
  out["use_output_norm"] = c.use_output_norm;
  out["qk_norm"] = c.qk_norm.empty() ? json(nullptr) : json(c.qk_norm);
  out["qk_activation"] = c.qk_activation;
  out["safe_gate"] = c.safe_gate;
  out["lower_bound"] = optional_json(c.lower_bound);
  if (c.num_householder > 0) out["num_householder"] = c.num_householder;
  for (const auto& [name, rank] : {std::pair{"decay_low_rank_dim", c.decay_low_rank_dim},
                                   {"a_low_rank_dim", c.a_low_rank_dim},
                                   {"v_low_rank_dim", c.v_low_rank_dim},
                                   {"gate_low_rank_dim", c.gate_low_rank_dim}}) {
    if (rank > 0) out[name] = rank;
  }
}

}  // namespace

json to_json(const LanguageModelConfig& c) {
  json out = common_json(c);
  const bool attention_only = mixer_preset(c.mixer).softmax;
  const MixerConfig mixer = attention_only ? MixerConfig{} : c.mixer_config();
  const std::string type = attention_only ? "efla" : model_type_of(c, mixer);
  out["model_type"] = type;
  const bool gated_output = mixer.output_gate != OutputGate::none;
  if (type == "delta_net") {
    const auto width = static_cast<double>(c.hidden_size);
    out["architectures"] = json::array({"DeltaNetForCausalLM"});
    out["expand_k"] = static_cast<double>(mixer.key_dim * c.num_heads) / width;
    out["expand_v"] = static_cast<double>(mixer.value_dim * c.num_heads) / width;
    out["use_gate"] = gated_output;
    out["use_beta"] = c.use_beta;
    out["use_output_norm"] = true;
    out["qk_norm"] = c.qk_norm.empty() ? "l2" : c.qk_norm;
    out["qk_activation"] = c.qk_activation;
  } else if (type != "efla") {
    out["architectures"] = json::array({type == "kda"                  ? "KDAForCausalLM"
                                        : type == "comba"              ? "CombaForCausalLM"
                                        : type == "gated_deltaproduct" ? "GatedDeltaProductForCausalLM"
                                                                       : "GatedDeltaNetForCausalLM"});
    out["head_dim"] = mixer.key_dim;
    out["expand_v"] = static_cast<double>(mixer.value_dim) / static_cast<double>(mixer.key_dim);
    if (type != "gated_deltaproduct")
      out["num_v_heads"] = mixer.value_heads == 0 ? json(nullptr) : json(mixer.value_heads);
    if (type == "kda") {
      out["safe_gate"] = c.safe_gate;
      out["lower_bound"] = optional_json(mixer.lower_bound);
    } else if (type == "comba") {
      out["use_output_gate"] = gated_output;
      out["use_output_correction"] = true;
      out["use_inner_decay"] = true;
    } else if (type == "gated_deltaproduct") {
      out["use_output_gate"] = gated_output;
      out["use_forget_gate"] = c.mixer == "gated-deltaproduct";
      out["num_householder"] =
          mixer.steps_per_token == 0 ? mixer_preset(c.mixer).steps_per_token : mixer.steps_per_token;
    } else {
      out["use_gate"] = gated_output;
    }
  } else {
    add_efla_fields(c, out);
  }
  return out;
}

LanguageModelConfig language_model_config_from_json(const Fields& fields) {
  std::string type;
  fields.read("model_type", type);
  LanguageModelConfig config;
  if (type == "delta_net") {
    config = read_delta_net(fields);
  } else if (type == "gated_deltanet") {
    config = read_gated_deltanet(fields);
  } else if (type == "kda") {
    config = read_kda(fields);
  } else if (type == "comba") {
    config = read_comba(fields);
  } else if (type == "gated_deltaproduct") {
    config = read_gated_deltaproduct(fields);
  } else if (type == "efla") {
    read_common(fields, config);
    read_efla(fields, config);
  } else {
    fields.refuse("model_type", "delta_net, gated_deltanet, kda, comba, gated_deltaproduct or efla");
  }
  allow_values(fields, "quantization_config", {nullptr});
  read_other_fields(fields);
  fields.refuse_others();
  fields.check([&] { validate(config); });
  return config;
}

LanguageModelConfig language_model_config_from_table(const Fields& fields) {
  std::string preset;
  fields.read("preset", preset);
  LanguageModelConfig config =
      preset.empty() ? LanguageModelConfig{} : fields.check([&] { return language_model_preset(preset); });
  read_common(fields, config);
  read_efla(fields, config);
  fields.refuse_others();
  fields.check([&] { validate(config); });
  return config;
}

std::vector<std::string> language_model_presets() {
  std::vector<std::string> names;
  for (const auto& [name, config] : presets()) names.emplace_back(name);
  return names;
}

LanguageModelConfig language_model_preset(std::string_view wanted) {
  for (const auto& [name, config] : presets()) {
    if (name == wanted) return config;
  }
  const auto names = language_model_presets();
  throw Error("language model", "preset", fmt::format("'{}'", wanted),
              fmt::format("one of {} (nearest: {})", fmt::join(names, ", "), nearest_name(wanted, names)));
}

}  // namespace efla::nn
