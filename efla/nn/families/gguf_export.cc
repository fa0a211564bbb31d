#include "efla/nn/families/gguf_export.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "efla/base/check.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/families/gguf_config.h"

namespace efla::nn {
namespace {

using Order = std::vector<std::int64_t>;  // of each place the number of what moves there

// The numbers of a tensor, row by row.
struct RowSource {
  std::int64_t rows = 0, columns = 0;
  std::function<void(std::int64_t row, float* to)> read;
};

RowSource rows_of(const StoredMatrix& matrix) {
  const auto extent = matrix.narrow ? matrix.narrow.extent : matrix.wide.extent;
  return {extent[0], extent[1], [matrix, columns = extent[1]](std::int64_t row, float* to) {
            for (std::int64_t c = 0; c < columns; ++c) {
              to[c] = matrix.narrow ? to_float(matrix.narrow(row, c)) : matrix.wide(row, c);
            }
          }};
}

RowSource rows_of(Vector values, std::int64_t columns) {
  const auto rows = std::ssize(values) / columns;
  return {rows, columns, [values = std::move(values), columns](std::int64_t row, float* to) {
            std::copy_n(values.begin() + row * columns, columns, to);
          }};
}

// Returns the source with rows and columns moved; an empty order moves none.
RowSource moved(RowSource from, Order rows, Order columns) {
  const std::int64_t width = from.columns;
  return {from.rows, width,
          [from = std::move(from), rows = std::move(rows), columns = std::move(columns)](std::int64_t row, float* to) {
            Vector read(static_cast<std::size_t>(from.columns));
            from.read(rows.empty() ? row : rows[static_cast<std::size_t>(row)], read.data());
            for (std::size_t c = 0; c < read.size(); ++c) {
              to[c] = read[columns.empty() ? c : static_cast<std::size_t>(columns[c])];
            }
          }};
}

// Collects the tensors of a file.
class GgufTensorList {
 public:
  // type: of the weights of MLPs. Four bits are too few for others, which then have eight.
  GgufTensorList(const MixerConfig& mixer, const std::string& type)
      : mixer_(mixer),
        mlp_type_(io::find_gguf_type(type)),
        type_(type == "Q4_0" ? io::find_gguf_type("Q8_0") : mlp_type_) {}

  std::span<const io::GgufNewTensor> tensors() const { return tensors_; }

  void weight(const std::string& name, RowSource from) { weight(name, std::move(from), type_); }
  void exact(const std::string& name, RowSource from) {
    const std::vector<std::int64_t> shape{from.rows, from.columns};
    add(name, *io::find_gguf_type("F32"), shape, std::move(from));
  }
  // Adds numbers, moved unless the order is empty.
  void vector(const std::string& name, Vector values, Order order = {}) {
    const auto size = std::ssize(values);
    add(name, *io::find_gguf_type("F32"), {size}, moved(rows_of(std::move(values), size), {}, std::move(order)));
  }
  void layer(const std::string& block, const LayerTensors& from) {
    vector(block + "attn_norm.weight", from.before_mixer);
    vector(block + "post_attention_norm.weight", from.before_mlp);
    weight(block + "ffn_gate.weight", rows_of(from.mlp.gate_up[0]), mlp_type_);
    weight(block + "ffn_up.weight", rows_of(from.mlp.gate_up[1]), mlp_type_);
    weight(block + "ffn_down.weight", rows_of(from.mlp.down), mlp_type_);
    from.attends ? attention(block, from.attention) : mixer(block, from.mixer);
  }
  void draft_head(const std::string& block, const DraftHeadTensors& from) {
    weight(block + "nextn.eh_proj.weight", rows_of(from.fc));
    vector(block + "nextn.enorm.weight", from.embedding_norm);
    vector(block + "nextn.hnorm.weight", from.hidden_norm);
    vector(block + "nextn.shared_head_norm.weight", from.norm);
    layer(block, from.layer);
  }

 private:
  void weight(const std::string& name, RowSource from, const io::GgufType* type) {
    const bool whole = from.columns % type->elements == 0;
    const std::vector<std::int64_t> shape{from.rows, from.columns};
    add(name, *(whole ? type : io::find_gguf_type("F16")), shape, std::move(from));
  }

  void add(const std::string& name, const io::GgufType& type, std::vector<std::int64_t> shape, RowSource from) {
    const auto make = [&type, from = std::move(from)] {
      const auto row_bytes = static_cast<std::size_t>(from.columns / type.elements * type.bytes);
      io::Bytes bytes(static_cast<std::size_t>(from.rows) * row_bytes);
      Vector row(static_cast<std::size_t>(from.columns));
      for (std::int64_t r = 0; r < from.rows; ++r) {
        from.read(r, row.data());
        io::quantise(type, row.data(), from.columns, bytes.data() + static_cast<std::size_t>(r) * row_bytes);
      }
      return bytes;
    };
    tensors_.push_back({name, &type, std::move(shape), make});
  }

  void attention(const std::string& block, const AttentionTensors& from) {
    weight(block + "attn_q.weight", rows_of(from.in[0]));
    weight(block + "attn_k.weight", rows_of(from.in[1]));
    weight(block + "attn_v.weight", rows_of(from.in[2]));
    weight(block + "attn_output.weight", rows_of(from.out));
    vector(block + "attn_q_norm.weight", from.q_norm);
    vector(block + "attn_k_norm.weight", from.k_norm);
  }

  // in: of q, k and v together, step sizes, decays, gates.
  void mixer(const std::string& block, const MixerTensors& from) {
    const std::int64_t keys = 2 * mixer_.heads * mixer_.key_dim, dim = mixer_.value_dim;
    Vector rates = from.a_log;
    for (auto& rate : rates) rate = static_cast<float>(-std::exp(double{rate}));
    weight(block + "attn_qkv.weight", moved(rows_of(from.in[0]), order(keys, dim), {}));
    exact(block + "ssm_beta.weight", moved(rows_of(from.in[1]), order(0, 1), {}));
    exact(block + "ssm_alpha.weight", moved(rows_of(from.in[2]), order(0, 1), {}));
    weight(block + "attn_gate.weight", moved(rows_of(from.in[3]), order(0, dim), {}));
    exact(block + "ssm_conv1d.weight", moved(rows_of(from.taps, mixer_.conv), order(keys, dim), {}));
    vector(block + "ssm_a", std::move(rates), order(0, 1));
    vector(block + "ssm_dt.bias", from.dt_bias, order(0, 1));
    vector(block + "ssm_norm.weight", from.o_norm);
    weight(block + "ssm_out.weight", moved(rows_of(from.out), {}, order(0, dim)));
  }

  // Returns where the rows of value heads come from, `size` per head behind the first `skipped` rows: the place
  // j · H + g has head g · r + j, of r per key head.
  Order order(std::int64_t skipped, std::int64_t size) const {
    const std::int64_t ratio = mixer_.value_heads / mixer_.heads;
    Order order;
    for (std::int64_t i = 0; i < skipped; ++i) order.push_back(i);
    for (std::int64_t place = 0; place < mixer_.value_heads; ++place) {
      const std::int64_t head = place % mixer_.heads * ratio + place / mixer_.heads;
      for (std::int64_t i = 0; i < size; ++i) order.push_back(skipped + head * size + i);
    }
    return order;
  }

  const MixerConfig mixer_;
  const io::GgufType *const mlp_type_, *const type_;
  std::vector<io::GgufNewTensor> tensors_;
};

// Returns max_position_embeddings of a folder's config.json, which no computation needs.
std::int64_t longest_context(const std::filesystem::path& folder) {
  constexpr std::int64_t kQwen35 = 262'144;
  const auto path = folder / "config.json";
  const auto content = io::read_json(path);
  const io::Fields fields(content, io::refuse_in_file(path.string()));
  const auto own = (fields.find("text_config") == nullptr ? fields : fields.object("text_config"))
                       .find<std::int64_t>("max_position_embeddings", 1, INT32_MAX);
  return own.value_or(kQwen35);
}

std::uint32_t file_type(const std::string& type) {
  return type == "F32" ? 0 : type == "F16" ? 1 : type == "Q4_0" ? 2 : type == "Q8_0" ? 7 : 32;
}

// draft_heads: 0 or 1, blocks behind the layers.
io::GgufEntries entries_of(const FamilyConfig& config, std::int64_t draft_heads, std::int64_t context,
                           const std::string& type) {
  io::GgufEntries entries{{"general.architecture", std::string("qwen35")}, {"general.file_type", file_type(type)}};
  const auto integer = [&](const char* name, std::int64_t value) {
    entries.emplace_back(std::string("qwen35.") + name, static_cast<std::uint32_t>(value));
  };
  const auto real = [&](const char* name, double value) {
    entries.emplace_back(std::string("qwen35.") + name, static_cast<float>(value));
  };
  const MixerConfig& mixer = config.mixer;
  integer("block_count", config.layers() + draft_heads);
  if (draft_heads > 0) integer("nextn_predict_layers", draft_heads);
  integer("context_length", context);
  integer("embedding_length", config.hidden_size);
  integer("feed_forward_length", config.intermediate_size);
  integer("vocab_size", config.vocab_size);
  integer("attention.head_count", config.heads);
  integer("attention.head_count_kv", config.key_value_heads);
  integer("attention.key_length", config.head_dim);
  integer("attention.value_length", config.head_dim);
  real("attention.layer_norm_rms_epsilon", config.norm_eps);
  real("rope.freq_base", config.rope_theta);
  integer("rope.dimension_count", config.rotary);
  const auto half = static_cast<std::int32_t>(config.rotary / 2), third = half / 3;  // of text all have one position
  entries.emplace_back("qwen35.rope.dimension_sections", std::vector<std::int32_t>{half - 2 * third, third, third, 0});
  integer("ssm.conv_kernel", mixer.conv);
  integer("ssm.state_size", mixer.key_dim);
  integer("ssm.group_count", mixer.heads);
  integer("ssm.time_step_rank", mixer.value_heads);
  integer("ssm.inner_size", mixer.value_heads * mixer.value_dim);
  std::vector<bool> recurrent = config.attends;
  recurrent.flip();
  recurrent.resize(recurrent.size() + static_cast<std::size_t>(draft_heads), false);
  entries.emplace_back("qwen35.attention.recurrent_layers", recurrent);
  return entries;
}

}  // namespace

GgufExported export_gguf(const std::filesystem::path& folder, const std::filesystem::path& file,
                         const std::string& type, const io::GgufEntries& metadata) {
  const Require require("export");
  require(!is_gguf(folder), "gguf", "a GGUF file as model", "a folder");
  const FamilyConfig config = load_family_config(folder);
  require(config.family->model_type == "qwen3_5", "gguf", std::string(config.family->model_type) + " as model",
          "qwen3_5");
  FamilyTensors tensors(folder, config);
  const StoredMatrix embeddings = tensors.embeddings();
  const std::string chosen = !type.empty() ? type : embeddings.narrow ? "BF16" : "F32";
  constexpr std::string_view kTypes[]{"F32", "F16", "BF16", "Q8_0", "Q4_0"};
  require(std::ranges::find(kTypes, chosen) != std::end(kTypes), "gguf_type", type, "F32, F16, BF16, Q8_0 or Q4_0");
  GgufTensorList list(config.mixer, chosen);
  list.weight("token_embd.weight", rows_of(embeddings));
  if (!tensors.tied()) list.weight("output.weight", rows_of(tensors.head()));
  list.vector("output_norm.weight", tensors.norm());
  const MixerPlan plan(config.mixer);
  const auto block = [](std::int64_t i) { return "blk." + std::to_string(i) + "."; };
  for (std::int64_t i = 0; i < config.layers(); ++i) list.layer(block(i), tensors.layer(i, plan));
  const bool drafts = tensors.has_draft_head();
  if (drafts) list.draft_head(block(config.layers()), tensors.draft_head());
  const GgufExported exported{tensors.elements_read(), tensors.check_all_read(), chosen};
  auto entries = entries_of(config, drafts ? 1 : 0, longest_context(folder), chosen);
  entries.insert(entries.end(), metadata.begin(), metadata.end());
  io::write_gguf(file, entries, list.tensors());
  return exported;
}

}  // namespace efla::nn
