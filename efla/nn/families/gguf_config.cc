#include "efla/nn/families/gguf_config.h"

#include <string>
#include <variant>

#include "efla/io/content_error.h"
#include "efla/io/json.h"

namespace efla::nn {
namespace {

using nlohmann::json;

constexpr std::string_view kArchitecture = "qwen35";
constexpr std::int64_t kMostBlocks = 1 << 12;

// Reads the values of keys that begin with the architecture's name.
class Keys {
 public:
  explicit Keys(const io::GgufFile& file) : file_(file) {}

  std::int64_t need(std::string_view name) const {
    const auto* value = file_.integer(key(name));
    if (value == nullptr) io::fail_in(file_.path(), "has no " + key(name));
    return *value;
  }
  std::int64_t find(std::string_view name, std::int64_t absent) const {
    const auto* value = file_.integer(key(name));
    return value == nullptr ? absent : *value;
  }
  double real(std::string_view name) const {
    const auto found = file_.metadata().find(key(name));
    const auto* value = found == file_.metadata().end() ? nullptr : std::get_if<double>(&found->second);
    if (value == nullptr) io::fail_in(file_.path(), "has no number " + key(name));
    return *value;
  }
  const std::vector<std::int64_t>* integers(std::string_view name) const { return file_.integers(key(name)); }
  const std::string_view* text(std::string_view name) const { return file_.text(key(name)); }
  [[noreturn]] void refuse(std::string_view name, const std::string& expected) const {
    io::fail_in(file_.path(), key(name) + ": expected " + expected);
  }

 private:
  static std::string key(std::string_view name) { return std::string(kArchitecture).append(".").append(name); }

  const io::GgufFile& file_;
};

// Returns which layers attend. The blocks of drafts behind them do not count.
json layer_types(const Keys& keys, std::int64_t layers) {
  const auto* recurrent = keys.integers("attention.recurrent_layers");
  if (recurrent != nullptr && std::ssize(*recurrent) < layers) keys.refuse("attention.recurrent_layers", "all layers");
  const auto interval = keys.find("full_attention_interval", 4);
  if (interval < 1) keys.refuse("full_attention_interval", "a positive number");
  json types = json::array();
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool attends =
        recurrent != nullptr ? (*recurrent)[static_cast<std::size_t>(i)] == 0 : (i + 1) % interval == 0;
    types.push_back(attends ? "full_attention" : "linear_attention");
  }
  return types;
}

json rope(const Keys& keys, std::int64_t head_dim) {
  const auto* scaling = keys.text("rope.scaling.type");
  if (scaling != nullptr && *scaling != "none")
    keys.refuse("rope.scaling.type", "none, the only one that is supported");
  const auto rotary = keys.need("rope.dimension_count");
  if (rotary < 0 || rotary > head_dim) keys.refuse("rope.dimension_count", "at most attention.key_length");
  // A half more, because config.json has a quotient, whose product with the size is rounded down.
  const double part = rotary == head_dim ? 1.0 : (static_cast<double>(rotary) + 0.5) / static_cast<double>(head_dim);
  return {{"rope_type", "default"}, {"rope_theta", keys.real("rope.freq_base")}, {"partial_rotary_factor", part}};
}

}  // namespace

json gguf_config(const io::GgufFile& file) {
  const auto* architecture = file.text("general.architecture");
  if (architecture == nullptr || *architecture != kArchitecture) {
    io::fail_in(file.path(), "general.architecture: got " +
                                 io::brief(architecture == nullptr ? json() : json(std::string(*architecture))) +
                                 ", expected " + std::string(kArchitecture));
  }
  const Keys keys(file);
  const auto* embeddings = file.find("token_embd.weight");
  if (embeddings == nullptr) io::fail_in(file.path(), "has no tensor token_embd.weight");
  const auto blocks = keys.need("block_count"), layers = blocks - keys.find("nextn_predict_layers", 0);
  if (layers < 1 || blocks > kMostBlocks) keys.refuse("block_count", "1 to " + std::to_string(kMostBlocks) + " layers");
  const auto head_dim = keys.need("attention.key_length"), inner = keys.need("ssm.inner_size");
  const auto value_heads = keys.need("ssm.time_step_rank");
  if (keys.need("attention.value_length") != head_dim) keys.refuse("attention.value_length", "attention.key_length");
  if (value_heads < 1 || inner % value_heads != 0) keys.refuse("ssm.inner_size", "a multiple of ssm.time_step_rank");
  json config{{"model_type", "qwen3_5_text"},
              {"vocab_size", embeddings->shape.front()},
              {"hidden_size", keys.need("embedding_length")},
              {"intermediate_size", keys.need("feed_forward_length")},
              {"num_hidden_layers", layers},
              {"num_attention_heads", keys.need("attention.head_count")},
              {"num_key_value_heads", keys.need("attention.head_count_kv")},
              {"head_dim", head_dim},
              {"rms_norm_eps", keys.real("attention.layer_norm_rms_epsilon")},
              {"linear_num_key_heads", keys.need("ssm.group_count")},
              {"linear_num_value_heads", value_heads},
              {"linear_key_head_dim", keys.need("ssm.state_size")},
              {"linear_value_head_dim", inner / value_heads},
              {"linear_conv_kernel_dim", keys.need("ssm.conv_kernel")},
              {"tie_word_embeddings", file.find("output.weight") == nullptr},
              {"layer_types", layer_types(keys, layers)},
              {"rope_parameters", rope(keys, head_dim)}};
  json ends = json::array();
  for (const char* name : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (const auto* id = file.integer(name)) ends.push_back(*id);
  }
  if (!ends.empty()) config["eos_token_id"] = ends;
  if (const auto* id = file.integer("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *id;
  return config;
}

}  // namespace efla::nn
