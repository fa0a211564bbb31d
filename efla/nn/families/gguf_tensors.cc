#include "efla/nn/families/gguf_tensors.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "efla/base/text.h"
#include "efla/io/content_error.h"
#include "efla/io/gguf/gguf_dequantise.h"

namespace efla::nn {
namespace {

// A tensor's name in a block of the file, and the name in transformers' layer.
constexpr std::pair<std::string_view, std::string_view> kLayerNames[]{
    {"attn_norm.weight", "input_layernorm.weight"},
    {"post_attention_norm.weight", "post_attention_layernorm.weight"},
    {"attn_qkv.weight", "linear_attn.in_proj_qkv.weight"},
    {"attn_gate.weight", "linear_attn.in_proj_z.weight"},
    {"ssm_beta.weight", "linear_attn.in_proj_b.weight"},
    {"ssm_alpha.weight", "linear_attn.in_proj_a.weight"},
    {"ssm_conv1d.weight", "linear_attn.conv1d.weight"},
    {"ssm_a", "linear_attn.A_log"},
    {"ssm_dt.bias", "linear_attn.dt_bias"},
    {"ssm_norm.weight", "linear_attn.norm.weight"},
    {"ssm_out.weight", "linear_attn.out_proj.weight"},
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},
    {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"attn_q_norm.weight", "self_attn.q_norm.weight"},
    {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"}};

// The same for the head for drafts, which is the block behind the layers.
constexpr std::pair<std::string_view, std::string_view> kDraftNames[]{
    {"nextn.eh_proj.weight", "fc.weight"},
    {"nextn.enorm.weight", "pre_fc_norm_embedding.weight"},
    {"nextn.hnorm.weight", "pre_fc_norm_hidden.weight"},
    {"nextn.shared_head_norm.weight", "norm.weight"}};

// Returns the second name of a row; "": there is none.
std::string_view second_name(std::span<const std::pair<std::string_view, std::string_view>> names,
                             std::string_view first) {
  const auto found = std::ranges::find(names, first, [](const auto& row) { return row.first; });
  return found == names.end() ? "" : found->second;
}

// Returns transformers' name of a tensor; for blocks behind the head for drafts a name that the family skips.
std::string transformers_name(const std::string& name, std::int64_t layers) {
  if (name == "token_embd.weight") return "model.embed_tokens.weight";
  if (name == "output_norm.weight") return "model.norm.weight";
  if (name == "output.weight") return "lm_head.weight";
  constexpr std::string_view kBlock = "blk.";
  std::int64_t block = -1;
  const char* const end = name.data() + name.size();
  if (!name.starts_with(kBlock)) return name;
  const auto [dot, error] = std::from_chars(name.data() + kBlock.size(), end, block);
  if (error != std::errc() || dot == end || *dot != '.') return name;
  const std::string_view part(dot + 1, end);
  const auto known = second_name(kLayerNames, part), draft = second_name(kDraftNames, part);
  if (block > layers || (block == layers && known.empty() && draft.empty())) return "mtp." + name;
  if (block == layers) return draft.empty() ? "mtp.layers.0." + std::string(known) : "mtp." + std::string(draft);
  return known.empty() ? name : "model.layers." + std::to_string(block) + "." + std::string(known);
}

// Returns the part of a name behind the layer's delta mixer; "" for other tensors.
std::string_view mixer_part(std::string_view name) {
  constexpr std::string_view kMixer = ".linear_attn.";
  const auto at = name.find(kMixer);
  return at == std::string_view::npos ? "" : name.substr(at + kMixer.size());
}

std::int64_t count_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies());
}

// Returns the numbers of some blocks in float32, or rounded to bfloat16.
template <class T>
std::shared_ptr<io::Bytes> numbers_in(const io::GgufType& type, io::ByteView bytes) {
  const auto block_bytes = static_cast<std::size_t>(type.bytes), elements = static_cast<std::size_t>(type.elements);
  const auto numbers = std::make_shared<io::Bytes>(bytes.size() / block_bytes * elements * sizeof(T));
  auto* to = reinterpret_cast<T*>(numbers->data());
  std::vector<float> wide(elements);
  for (std::size_t at = 0; at < bytes.size(); at += block_bytes, to += elements) {
    io::dequantise(type, bytes.subspan(at, block_bytes), wide.data());
    std::ranges::transform(wide, to, [](float number) {
      if constexpr (std::is_same_v<T, bfloat16>) {
        return to_bfloat16(number);
      } else {
        return number;
      }
    });
  }
  return numbers;
}

// Returns whether a part of a delta mixer has one row per head, as step sizes and decays have.
bool is_row_per_head(std::string_view part) { return part == "in_proj_b.weight" || part == "in_proj_a.weight"; }

void replace_bytes(SourceTensor& tensor, std::shared_ptr<io::Bytes> bytes) {
  tensor.tensor.bytes = *bytes;
  tensor.owner = std::move(bytes);
}

// Returns the type in which a weight of linear layers computes that the file has in `type`, without blocks.
std::string_view type_in_memory(std::string_view type, WeightType weights) {
  const bool narrow = type != "F32" && type != "F16";
  if (weights == WeightType::float32) return narrow ? "bfloat16" : "float32";
  return name_of(weights);
}

}  // namespace

GgufTensors::GgufTensors(const std::filesystem::path& path) : file_(std::make_shared<const io::GgufFile>(path)) {
  const auto config = gguf_config(*file_);
  const auto layers = config["num_hidden_layers"].get<std::int64_t>();
  key_heads_ = config["linear_num_key_heads"];
  value_heads_ = config["linear_num_value_heads"];
  value_dim_ = config["linear_value_head_dim"];
  key_rows_ = 2 * key_heads_ * config["linear_key_head_dim"].get<std::int64_t>();
  for (const auto& tensor : file_->tensors()) {
    const auto name = transformers_name(tensor.name, layers);
    if (!tensors_.emplace(name, &tensor).second)
      io::fail_in(this->path(), "has two tensors for " + io::printable(name));
  }
}

std::vector<std::string> GgufTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

// Returns the bytes of a delta mixer's tensor with its value heads in transformers' order. row_bytes: of one row, in
// which a head's numbers take whole bytes.
std::shared_ptr<io::Bytes> GgufTensors::in_order(const io::GgufTensor& tensor, std::string_view part,
                                                 io::ByteView bytes, std::int64_t row_bytes) const {
  const bool columns = part == "out_proj.weight";
  const bool one_row = is_row_per_head(part) || tensor.shape.size() == 1;
  const bool behind_keys = part == "in_proj_qkv.weight" || part == "conv1d.weight";
  const std::int64_t numbers = columns ? row_bytes / value_heads_ : row_bytes * (one_row ? 1 : value_dim_);
  const std::int64_t first = behind_keys ? key_rows_ * row_bytes : 0, ratio = value_heads_ / key_heads_;
  const std::int64_t size = std::ssize(bytes), all = value_heads_ * numbers;
  if (all == 0 || size < first || (size - first) % all != 0) {
    io::fail_in(path(), io::printable(tensor.name) + " has another shape than the model's sizes give");
  }
  auto ordered = std::make_shared<io::Bytes>(bytes.begin(), bytes.end());
  for (std::int64_t at = first; at < size; at += all) {
    for (std::int64_t h = 0; h < value_heads_; ++h) {
      const std::int64_t from = h % ratio * key_heads_ + h / ratio;
      std::memcpy(ordered->data() + at + h * numbers, bytes.data() + at + from * numbers,
                  static_cast<std::size_t>(numbers));
    }
  }
  return ordered;
}

// Returns A_log in float32 from −exp(A_log).
std::shared_ptr<io::Bytes> GgufTensors::logarithms_of(const io::GgufTensor& tensor, io::ByteView bytes) const {
  auto logs = std::make_shared<io::Bytes>(bytes.begin(), bytes.end());
  for (float& number : std::span(reinterpret_cast<float*>(logs->data()), logs->size() / sizeof(float))) {
    if (!(number <= 0.0F)) io::fail_in(path(), io::printable(tensor.name) + ": expected numbers of at most 0");
    number = static_cast<float>(std::log(-static_cast<double>(number)));
  }
  return logs;
}

// Returns whether the value heads of a mixer's part are in another order than in a folder.
bool GgufTensors::is_turned(std::string_view part) const {
  return !part.empty() && part != "norm.weight" && key_heads_ > 0 && value_heads_ > key_heads_;
}

std::optional<QuantType> GgufTensors::kept_blocks(const std::string& name) const {
  const io::GgufTensor& tensor = find(name);
  const auto part = mixer_part(name);
  // Columns of out_proj that belong to a head can be moved if they are whole blocks.
  const bool divides = is_turned(part) && part == "out_proj.weight" && value_dim_ % tensor.type->elements != 0;
  const bool keeps = !divides && !is_row_per_head(part) && tensor.shape.size() == 2;
  return keeps ? io::quant_type(*tensor.type) : std::nullopt;
}

// Returns a tensor in the file's order: numbers in floating point as they are, quantised weights in bfloat16, and in
// float32 what decides much.
SourceTensor GgufTensors::numbers_of(const std::string& name, bool matrix) const {
  const io::GgufTensor& tensor = find(name);
  const io::GgufType& type = *tensor.type;
  const auto part = mixer_part(name);
  if (!io::can_dequantise(type)) {
    io::fail_in(path(), io::printable(tensor.name) + " is " + std::string(type.name) + ", expected one of " +
                            io::dequantised_types());
  }
  SourceTensor read = as_stored(name);
  if (type.elements == 1 && part != "A_log") {
    read.tensor.type = *io::type_from_name(type.name);
  } else if (matrix && !is_row_per_head(part)) {
    read.tensor.type = io::TensorType::BF16;
    replace_bytes(read, numbers_in<bfloat16>(type, tensor.bytes));
  } else {
    replace_bytes(read, numbers_in<float>(type, tensor.bytes));
  }
  return read;
}

SourceTensor GgufTensors::read(const std::string& name, bool matrix) const {
  const io::GgufTensor& tensor = find(name);
  const auto part = mixer_part(name);
  const auto blocks = matrix ? kept_blocks(name) : std::nullopt;
  SourceTensor read = blocks ? as_stored(name) : numbers_of(name, matrix);
  if (is_turned(part)) {
    const auto rows = tensor.shape.size() == 1 ? tensor.shape.front() : count_of(tensor.shape) / tensor.shape.back();
    replace_bytes(read, in_order(tensor, part, read.tensor.bytes, std::ssize(read.tensor.bytes) / rows));
  }
  if (part == "A_log") replace_bytes(read, logarithms_of(tensor, read.tensor.bytes));
  if (blocks) {
    const auto* data = reinterpret_cast<const std::byte*>(read.tensor.bytes.data());
    read.blocks = {*blocks, data, tensor.shape[0], tensor.shape[1]};
  }
  return read;
}

std::string GgufTensors::conversions(WeightType weights) const {
  std::map<std::pair<std::string_view, std::string_view>, int> counts;
  for (const auto& [name, tensor] : tensors_) {
    const auto part = mixer_part(name);
    const bool weight = tensor->shape.size() == 2 && part != "conv1d.weight" && !is_row_per_head(part);
    if (!weight || name.starts_with("mtp.") || kept_blocks(name)) continue;
    const bool of_mlp = name.find(".mlp.") != std::string::npos;
    const auto type = tensor->type->name, to = type_in_memory(type, of_mlp ? weights : at_least_int8(weights));
    const bool same = (type == "F32" && to == "float32") || (type == "BF16" && to == "bfloat16");
    if (!same) ++counts[{type, to}];
  }
  std::string text;
  for (const auto& [types, count] : counts) {
    const auto& [type, to] = types;
    text.append(text.empty() ? "" : ", ").append(type).append(" (").append(std::to_string(count));
    text.append(count == 1 ? " tensor) becomes " : " tensors) becomes ").append(to);
  }
  return text;
}

}  // namespace efla::nn
