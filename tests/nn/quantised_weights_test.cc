// Folders whose linear layers are quantised compute what the same folder has with the numbers in bfloat16.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "efla/nn/families/family_model.h"
#include "efla/nn/families/quantised_weights.h"
#include "tests/nn/random_family.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

using io::TensorType;
using Shape = std::vector<std::int64_t>;

// A quantised weight: its tensors, by what follows the layer's name, and its numbers.
struct Quantised {
  struct Part {
    std::string suffix;
    TensorType type;
    Shape shape;
    io::Bytes bytes;
  };
  std::vector<Part> parts = {};
  std::vector<float> values = {};

  template <class T>
  void add(const std::string& suffix, TensorType type, const Shape& shape, const std::vector<T>& elements) {
    const auto* const from = reinterpret_cast<const std::uint8_t*>(elements.data());
    parts.push_back({suffix, type, shape, io::Bytes(from, from + elements.size() * sizeof(T))});
  }
};

constexpr std::int64_t kGroups = 4;

// The integers of a weight, and the scales and zeros of a group g of columns.
int q_at(std::int64_t o, std::int64_t i) { return static_cast<int>((o * 7 + i * 3 + o * i) % 16); }
int zero_at(std::int64_t g, std::int64_t o) { return static_cast<int>((g + 2 * o) % 15); }
float scale_at(std::int64_t g, std::int64_t o) { return 0x1p-6F * static_cast<float>(1 + (g + o) % 4); }

// Writes four bits at a place of a word.
void put(std::vector<std::uint32_t>& words, std::int64_t word, std::int64_t place, int q) {
  words[static_cast<std::size_t>(word)] |= static_cast<std::uint32_t>(q) << (4 * place);
}

void add_scales(Quantised& weight, std::int64_t rows) {
  std::vector<float16> scales;
  for (std::int64_t g = 0; g < kGroups; ++g) {
    for (std::int64_t o = 0; o < rows; ++o) scales.push_back(to_float16(scale_at(g, o)));
  }
  weight.add("scales", TensorType::F16, {kGroups, rows}, scales);
}

Quantised in_fp8(std::int64_t rows, std::int64_t columns) {
  // 1, −2, 448, the smallest positive number, and the smallest that is not subnormal.
  const std::vector<std::pair<std::uint8_t, float>> numbers{
      {0x38, 1.0F}, {0xc0, -2.0F}, {0x7e, 448.0F}, {0x01, 0x1p-9F}, {0x08, 0x1p-6F}};
  const std::int64_t down = (rows + 127) / 128, across = (columns + 127) / 128;
  const auto scale = [&](std::int64_t block) { return 0.001F * static_cast<float>(1 + block); };
  Quantised weight;
  std::vector<std::uint8_t> bits;
  std::vector<float> scales;
  for (std::int64_t o = 0; o < rows; ++o) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const auto& [byte, number] = numbers[static_cast<std::size_t>((o * 7 + i) % std::ssize(numbers))];
      bits.push_back(byte);
      weight.values.push_back(number * scale(o / 128 * across + i / 128));
    }
  }
  for (std::int64_t block = 0; block < down * across; ++block) scales.push_back(scale(block));
  weight.add("weight", TensorType::F8_E4M3, {rows, columns}, bits);
  weight.add("weight_scale_inv", TensorType::F32, {down, across}, scales);
  return weight;
}

Quantised in_compressed_tensors(std::int64_t rows, std::int64_t columns) {
  const std::int64_t words = (columns + 7) / 8;
  std::vector<std::uint32_t> packed(static_cast<std::size_t>(rows * words));
  std::vector<bfloat16> scales;
  Quantised weight;
  for (std::int64_t o = 0; o < rows; ++o) {
    for (std::int64_t i = 0; i < columns; ++i) {
      put(packed, o * words + i / 8, i % 8, q_at(o, i));
      weight.values.push_back(static_cast<float>(q_at(o, i) - 8) * scale_at(i / (columns / kGroups), o));
    }
    for (std::int64_t g = 0; g < kGroups; ++g) scales.push_back(to_bfloat16(scale_at(g, o)));
  }
  weight.add("weight_packed", TensorType::I32, {rows, words}, packed);
  weight.add("weight_scale", TensorType::BF16, {rows, kGroups}, scales);
  weight.add("weight_shape", TensorType::I64, {2}, std::vector<std::int64_t>{rows, columns});
  return weight;
}

// The groups of columns are in an order of their own, as with desc_act.
Quantised in_gptq(std::int64_t rows, std::int64_t columns) {
  std::vector<std::uint32_t> packed(static_cast<std::size_t>(columns / 8 * rows)),
      zeros(static_cast<std::size_t>(kGroups * rows / 8));
  std::vector<std::int32_t> groups;
  for (std::int64_t i = 0; i < columns; ++i) groups.push_back(static_cast<std::int32_t>((i * 5 + i / 8) % kGroups));
  Quantised weight;
  for (std::int64_t o = 0; o < rows; ++o) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t g = groups[static_cast<std::size_t>(i)];
      put(packed, i / 8 * rows + o, i % 8, q_at(o, i));
      weight.values.push_back(static_cast<float>(q_at(o, i) - zero_at(g, o) - 1) * scale_at(g, o));
    }
    for (std::int64_t g = 0; g < kGroups; ++g) put(zeros, g * (rows / 8) + o / 8, o % 8, zero_at(g, o));
  }
  weight.add("qweight", TensorType::I32, {columns / 8, rows}, packed);
  weight.add("qzeros", TensorType::I32, {kGroups, rows / 8}, zeros);
  add_scales(weight, rows);
  weight.add("g_idx", TensorType::I32, {columns}, groups);
  return weight;
}

Quantised in_awq(std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kOutputs[]{0, 2, 4, 6, 1, 3, 5, 7};  // at the places of a word
  std::vector<std::uint32_t> packed(static_cast<std::size_t>(columns * rows / 8)),
      zeros(static_cast<std::size_t>(kGroups * rows / 8));
  Quantised weight;
  for (std::int64_t o = 0; o < rows; ++o) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t g = i / (columns / kGroups);
      weight.values.push_back(static_cast<float>(q_at(o, i) - zero_at(g, o)) * scale_at(g, o));
    }
  }
  for (std::int64_t word = 0; word < rows / 8; ++word) {
    for (std::int64_t place = 0; place < 8; ++place) {
      const std::int64_t o = word * 8 + kOutputs[place];
      for (std::int64_t i = 0; i < columns; ++i) put(packed, i * (rows / 8) + word, place, q_at(o, i));
      for (std::int64_t g = 0; g < kGroups; ++g) put(zeros, g * (rows / 8) + word, place, zero_at(g, o));
    }
  }
  weight.add("qweight", TensorType::I32, {columns, rows / 8}, packed);
  weight.add("qzeros", TensorType::I32, {kGroups, rows / 8}, zeros);
  add_scales(weight, rows);
  return weight;
}

std::vector<float> output_of(const std::filesystem::path& folder) {
  FamilyModel model(folder, WeightType::float32);
  const std::vector<std::int32_t> ids{3, 1, 4, 1, 5};
  const std::int64_t rows = std::ssize(ids), vocab_size = model.config().vocab_size, width = model.config().hidden_size;
  const TextRun run{.tokens = rows};
  ThreadPool pool(1);
  std::vector<float> hidden(static_cast<std::size_t>(rows * width)),
      logits(static_cast<std::size_t>(rows * vocab_size));
  const auto inner = View<float, 2>::contiguous(hidden.data(), {rows, width});
  model.make_slots(1);
  model.clear(0);
  model.advance(ids, std::span(&run, 1), inner, pool);
  model.logits(inner, View<float, 2>::contiguous(logits.data(), {rows, vocab_size}), pool);
  return logits;
}

struct Format {
  const char* name;  // for people
  std::function<Quantised(std::int64_t, std::int64_t)> quantise;
  nlohmann::json config;
};

std::vector<Format> all_formats() {
  const nlohmann::json group{{"weights", {{"num_bits", 4}, {"type", "int"}, {"symmetric", true}, {"group_size", 10}}},
                             {"input_activations", nullptr},
                             {"targets", {"Linear"}}};
  return {{"F8_E4M3",
           in_fp8,
           {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", {128, 128}},
            {"modules_to_not_convert", {"lm_head"}}}},
          {"int4 (compressed-tensors)",
           in_compressed_tensors,
           {{"quant_method", "compressed-tensors"},
            {"format", "pack-quantized"},
            {"config_groups", {{"group_0", group}}},
            {"ignore", {"lm_head"}},
            {"kv_cache_scheme", nullptr}}},
          {"int4 (GPTQ)",
           in_gptq,
           {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 10}, {"desc_act", true}, {"sym", false}}},
          {"int4 (AWQ)",
           in_awq,
           {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 10}, {"version", "gemm"}, {"zero_point", true}}}};
}

// A folder whose MLPs are quantised, and the same in bfloat16. `change` changes quantised tensors before they are
// written.
struct Folders {
  test::TempFolder quantised, narrow;

  explicit Folders(const Format& format, const std::function<void(const std::string&, Quantised&)>& change = {}) {
    auto config = random_family_config(false, 1);
    config.update({{"layer_types", {"linear_attention", "full_attention"}},
                   {"num_hidden_layers", 2},
                   {"hidden_size", 40},
                   {"intermediate_size", 320}});
    auto tensors = random_family_tensors(config, "model.", 1);
    std::map<std::string, Quantised> weights;
    for (auto& [name, tensor] : tensors.all) {
      if (name.find(".mlp.") == std::string::npos) continue;
      auto& weight = weights.emplace(name, format.quantise(tensor.shape[0], tensor.shape[1])).first->second;
      tensor.values = weight.values;
      if (change) change(name, weight);
    }
    write_family_folder(narrow.path(), config, tensors, false, /*narrow=*/true);
    config["quantization_config"] = format.config;
    io::write_file_atomically(quantised.path() / "config.json", config.dump());
    const io::SafetensorsFile file(narrow.path() / "model.safetensors");
    std::vector<io::NamedTensor> entries;
    for (const auto& [name, tensor] : tensors.all) {
      const auto found = weights.find(name);
      if (found == weights.end()) {
        entries.push_back(*file.find(name));
        continue;
      }
      const auto layer = name.substr(0, name.size() - std::string("weight").size());
      for (const auto& part : found->second.parts) {
        entries.push_back({layer + part.suffix, part.type, part.shape, part.bytes});
      }
    }
    io::write_safetensors(quantised.path() / "model.safetensors", entries, {{"format", "pt"}});
  }
  void refuse(const std::string& says) const {
    test::expect_bad_content([&] { FamilyModel(quantised.path(), WeightType::float32); }, -1, says);
  }
};

TEST(QuantisedWeights, ComputeWhatTheirNumbersInBfloat16Compute) {
  for (const auto& format : all_formats()) {
    SCOPED_TRACE(format.name);
    const Folders folders(format);
    EXPECT_EQ(output_of(folders.quantised.path()), output_of(folders.narrow.path()));
    const auto source = open_tensors(folders.quantised.path());
    EXPECT_EQ(source->conversions(WeightType::float32), std::string(format.name) + " (6 tensors) becomes bfloat16");
    EXPECT_EQ(source->names(), open_tensors(folders.narrow.path())->names());
  }
}

TEST(QuantisedWeights, RefuseTensorsThatContradictEachOther) {
  const std::string down = "model.layers.1.mlp.down_proj.weight";
  const auto formats = all_formats();
  const auto change_shape = [&](std::size_t part, Shape shape) {
    return [&, part, shape](const std::string& name, Quantised& weight) {
      if (name == down) weight.parts[part].shape = shape;
    };
  };
  const auto lose = [&](std::size_t part) {
    return [&, part](const std::string& name, Quantised& weight) {
      if (name == down) weight.parts.erase(weight.parts.begin() + static_cast<std::ptrdiff_t>(part));
    };
  };
  const auto set_number = [&](std::size_t part, std::int64_t number) {
    return [&, part, number](const std::string& name, Quantised& weight) {
      if (name == down) std::memcpy(weight.parts[part].bytes.data(), &number, 4);
    };
  };
  Folders(formats[0], lose(1)).refuse(down + " is F8_E4M3");
  Folders(formats[0], change_shape(1, {3, 1})).refuse("weight_scale_inv is F32 [3, 1]");
  Folders(formats[1], lose(2)).refuse("has no tensor " + down);
  Folders(formats[1], set_number(2, 1 << 30)).refuse("weight_packed has");
  Folders(formats[1], change_shape(1, {32, 5})).refuse("weight_scale is BF16 [32, 5]");
  Folders(formats[2], set_number(3, kGroups)).refuse("g_idx has group 4");
  Folders(formats[2], change_shape(1, {2, 10})).refuse("qzeros is I32 [2, 10]");
  Folders(formats[3], lose(2)).refuse("has no tensor " + down);
  Folders(formats[3], change_shape(2, {80, 2})).refuse("scales is F16 [80, 2]");
}

}  // namespace
}  // namespace efla::nn
