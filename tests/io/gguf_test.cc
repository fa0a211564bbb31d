// GGUF: what the reader takes and refuses, and the numbers of its types.
#include "efla/io/gguf/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "efla/io/gguf/gguf_dequantise.h"
#include "efla/io/gguf/gguf_write.h"
#include "efla/io/sha256.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::GgufBytes;
using test::TempFolder;

GgufContent parse(const std::string& bytes) { return parse_gguf(as_bytes(bytes), "x.gguf"); }

// Refuses a file, at any offset.
void expect_refused(const std::string& bytes, const std::string& says) {
  try {
    parse(bytes);
    ADD_FAILURE() << "nothing thrown, expected: " << says;
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
  }
}

// A small file that gguf-py wrote.
std::string written_file() { return test::read_text(std::string(EFLA_SOURCE_DIR) + "/tests/fuzz/corpus/gguf/whole"); }

TEST(Gguf, ReadsAFileOfGgufPy) {
  const auto bytes = written_file();
  const auto content = parse(bytes);
  const auto value = [&](const char* key) { return content.metadata.at(key); };
  EXPECT_EQ(std::get<std::string_view>(value("general.architecture")), "qwen35");
  EXPECT_EQ(std::get<std::int64_t>(value("qwen35.block_count")), 1);
  EXPECT_EQ(std::get<double>(value("qwen35.attention.layer_norm_rms_epsilon")), double{1e-6F});
  EXPECT_TRUE(std::get<bool>(value("x.bool")));
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(value("x.ints")), (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(std::get<std::vector<double>>(value("x.floats")), (std::vector<double>{0.5, 1.5}));
  EXPECT_EQ(std::get<std::vector<std::string_view>>(value("tokenizer.ggml.tokens")),
            (std::vector<std::string_view>{"a", "bc"}));
  ASSERT_EQ(content.tensors.size(), 2U);
  EXPECT_EQ(content.tensors[0].name, "a.weight");
  EXPECT_EQ(content.tensors[0].shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<float> wide(6);
  dequantise(*content.tensors[0].type, content.tensors[0].bytes, wide.data());
  EXPECT_EQ(wide, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(content.tensors[1].type->name, "Q8_0");
  EXPECT_EQ(content.tensors[1].bytes.size(), 68U);
}

TEST(Gguf, RefusesEveryFileThatIsCutShort) {
  const auto bytes = written_file();
  const std::size_t padding = 28;  // behind the last tensor's data
  for (std::size_t size = 0; size < bytes.size() - padding; ++size) {
    SCOPED_TRACE(size);
    EXPECT_THROW(parse(bytes.substr(0, size)), IoError);
  }
}

TEST(Gguf, SaysWhatIsWrong) {
  const auto file = [](const auto& change) {
    GgufBytes gguf;
    change(gguf);
    return gguf.bytes();
  };
  expect_refused("", "not a GGUF file");
  expect_refused(GgufBytes{.version = 1}.bytes(), "version 1 of GGUF, expected 2 or 3");
  expect_refused(GgufBytes{.version = 0x03000000}.bytes(), "big-endian");
  expect_refused(file([](GgufBytes& gguf) { gguf.text("a", "b").text("a", "b"); }), "the key \"a\" occurs twice");
  expect_refused(file([](GgufBytes& gguf) { gguf.integer("general.alignment", 24); }), "a power of two");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 99, {4}, "1234"); }), "has the unknown type 99");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 8, {1, 33}, "1234"); }), "whole blocks of 32 for Q8_0");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 0, {0}, ""); }), "an extent of 0");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 0, {1 << 30, 1 << 30, 1 << 30}, ""); }), "an extent of");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 0, {1, 1, 1, 1, 1}, "1234"); }), "has 5 extents");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 0, {2}, "12345678").tensor("a", 0, {1}, "1234"); }),
                 "occurs twice");
  expect_refused(file([](GgufBytes& gguf) { gguf.tensor("a", 0, {3}, "1234"); }), "but the file ends");
}

TEST(Gguf, OpensSplitFiles) {
  const TempFolder folder;
  const auto name = [&](int i) { return folder / ("m-0000" + std::to_string(i) + "-of-00002.gguf"); };
  const auto part = [](int number, const std::string& tensor) {
    GgufBytes gguf;
    gguf.integer("split.count", 2).integer("split.no", number).integer("split.tensors.count", 2);
    return gguf.tensor(tensor, 0, {1}, "1234").bytes();
  };
  write_file_atomically(name(1), part(0, "a"));
  test::expect_io_error([&] { GgufFile file(name(1)); }, IoError::Kind::missing, -1, "m-00002-of-00002.gguf");
  write_file_atomically(name(2), part(1, "b"));
  const GgufFile file(name(1));
  EXPECT_NE(file.find("a"), nullptr);
  EXPECT_NE(file.find("b"), nullptr);
  EXPECT_EQ(file.find("c"), nullptr);
  expect_bad_content([&] { GgufFile second(name(2)); }, -1, "not the first");
  write_file_atomically(name(2), part(1, "a"));
  expect_bad_content([&] { GgufFile twice(name(1)); }, -1, "in two of its files");
  write_file_atomically(name(2), part(0, "b"));
  expect_bad_content([&] { GgufFile wrong(name(1)); }, -1, "split.no: expected 1");
}

// The numbers of 64 blocks of random bytes, as gguf-py reads them. Bytes at `finite` lose bits, so that scales are
// finite.
struct Recorded {
  std::string_view name;
  std::vector<std::size_t> finite;
  std::string sha256;
};

TEST(GgufTypes, HaveTheNumbersOfGgufPy) {
  const std::vector<Recorded> all{
      {"F32", {3}, "65bd55d9f3f798fb9460bcd7b8b37acb306594af7f8a352cc8cfdaeec20886fb"},
      {"F16", {1}, "ee98f12cbed3355fefc00fdd55020b86b6db1a88f34bbc45e5d4b4fda21e51fa"},
      {"BF16", {1}, "4dddd0624abeb194cfdd8911ac8ec26988de8cade246b38abf7add0b53ca8879"},
      {"Q8_0", {1}, "3c22190148914e85a517649917f84ffa534bf4bc299dabbed865b1048dccc148"},
      {"Q4_0", {1}, "bf499aab57ebb465d032d2362a3dbcd9646fdae6ef61febf666dfbbf6fe28140"},
      {"Q4_1", {1, 3}, "ccd2693e5e13894d0a5c1c6b51cf1b8259063b46fe947747ba0c17a4a7a7d322"},
      {"Q5_0", {1}, "57a9462408f32fea29a39a82de2e35bd257449241a400ef92679107a918db35e"},
      {"Q5_1", {1, 3}, "9c371d0e47b1cbb7a5ff6e69b62485c9d3aef2f7ba0e0740c70d7dbaf33aa2b3"},
      {"Q2_K", {81, 83}, "bedbc5ee450d3f72426f54c2f1a75f56650b0f155fde9d2ab311bfb106ea9f37"},
      {"Q3_K", {109}, "d366a4c9fef242729b95b78984b744949a246a1e8915282de8042ba373d41c68"},
      {"Q4_K", {1, 3}, "544a1481fa8660ad1ad518ac85fc875b9205aa5f1ee825ed6d5240031b2e79fa"},
      {"Q5_K", {1, 3}, "cc5c615a1c15e715ccc2ebbe6556efec615ddca1d49d474243fb1bb3ce58709c"},
      {"Q6_K", {209}, "5c3048f5513fc98bf84aaffe0f05b3a92dd4ae88db6c97731b9f8625aa5aa458"},
      {"IQ4_NL", {1}, "f0fc0d354588ed270ce804fe4c05582b296ff0dd51d22557d86050bf2a08f7f5"},
      {"IQ4_XS", {1}, "83c2a4e54787883b882136c7df2e82ded6a3e5909cb656b09dcc63d93f599117"},
      {"MXFP4", {0}, "728d9ac2a18cb161c44d8fc250244c773146ccee9e64809019a522915081dc1d"},
  };
  for (const auto& [name, finite, sha256] : all) {
    SCOPED_TRACE(name);
    const GgufType* type = nullptr;
    for (std::uint32_t id = 0; type == nullptr || type->name != name; ++id) {
      ASSERT_LT(id, 64U);
      if (find_gguf_type(id) != nullptr) type = find_gguf_type(id);
    }
    const auto size = static_cast<std::size_t>(type->bytes);
    Bytes bytes(64 * size);
    std::uint32_t state = 1;
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>((state = state * 1664525 + 1013904223) >> 24);
    for (std::size_t block = 0; block < bytes.size(); block += size) {
      for (const auto at : finite) bytes[block + at] &= 0xBB;
    }
    std::vector<float> numbers(64 * static_cast<std::size_t>(type->elements));
    ASSERT_TRUE(can_dequantise(*type));
    dequantise(*type, bytes, numbers.data());
    const auto* data = reinterpret_cast<const std::uint8_t*>(numbers.data());
    EXPECT_EQ(io::sha256({data, numbers.size() * sizeof(float)}), sha256);
  }
}

TEST(GgufTypes, NamesTheOthers) {
  EXPECT_FALSE(can_dequantise(*find_gguf_type(16)));  // IQ2_XXS
  EXPECT_EQ(dequantised_types().substr(0, 14), "F32, F16, BF16");
}

TEST(Gguf, IsReadAsItWasWritten) {
  const TempFolder folder;
  const GgufEntries metadata{{"a", true},
                             {"b", std::uint32_t{7}},
                             {"c", 0.5F},
                             {"d", std::string("text")},
                             {"e", std::vector<bool>{true, false}},
                             {"f", std::vector<std::int32_t>{-1, 2}},
                             {"g", std::vector<std::string>{"", "xy"}}};
  const auto three = [] { return Bytes{1, 2, 3, 4, 5, 6}; };
  const std::vector<GgufNewTensor> tensors{{"t", find_gguf_type("F16"), {3}, three},
                                           {"u", find_gguf_type("BF16"), {3, 1}, three}};
  write_gguf(folder / "m.gguf", metadata, tensors);
  const GgufFile file(folder / "m.gguf");
  EXPECT_EQ(file.metadata(), (GgufMetadata{{"a", true},
                                           {"b", std::int64_t{7}},
                                           {"c", 0.5},
                                           {"d", std::string_view("text")},
                                           {"e", std::vector<std::int64_t>{1, 0}},
                                           {"f", std::vector<std::int64_t>{-1, 2}},
                                           {"g", std::vector<std::string_view>{"", "xy"}}}));
  ASSERT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.tensors()[1].name, "u");
  EXPECT_EQ(file.tensors()[1].type->name, "BF16");
  EXPECT_EQ(file.tensors()[1].shape, (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(Bytes(file.tensors()[1].bytes.begin(), file.tensors()[1].bytes.end()), three());
  const std::vector<GgufNewTensor> wrong{{"t", find_gguf_type("F32"), {3}, three}};
  test::expect_error([&] { write_gguf(folder / "n.gguf", {}, wrong); }, "t", "12");
  EXPECT_FALSE(std::filesystem::exists(folder / "n.gguf"));
}

// Blocks keep that a number is not finite, which an integer cannot say, and large numbers stay finite.
TEST(Gguf, RoundedNumbersAreFiniteWhereTheGivenOnesAre) {
  const auto rounded = [](const char* name, float number) {
    const GgufType& type = *find_gguf_type(name);
    std::vector<float> numbers(32, 1.0F), again(32);
    numbers[3] = number;
    Bytes bytes(static_cast<std::size_t>(type.bytes));
    quantise(type, numbers.data(), 32, bytes.data());
    dequantise(type, bytes, again.data());
    return again;
  };
  const auto is_finite = [](float x) { return std::isfinite(x); };
  for (const char* name : {"Q8_0", "Q4_0"}) {
    for (const float lost : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      EXPECT_TRUE(std::ranges::none_of(rounded(name, lost), is_finite)) << name << ' ' << lost;
    }
    for (const float large : {1e7F, -1e30F}) {
      const auto numbers = rounded(name, large);
      EXPECT_TRUE(std::ranges::all_of(numbers, is_finite)) << name << ' ' << large;
      EXPECT_GT(numbers[3] / large, 0.0F);
    }
  }
}

// gguf-py's quantize gave the bytes of Q8_0.
TEST(Gguf, NumbersAreRoundedAsByGgufPy) {
  std::vector<float> numbers(32);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i) * 0.37F - 5.0F;
  Bytes bytes(34);
  quantise(*find_gguf_type("Q8_0"), numbers.data(), 32, bytes.data());
  EXPECT_EQ(bytes, (Bytes{133, 42, 158, 165, 172, 180, 187, 194, 201, 209, 216, 223, 230, 238, 245, 252, 4,
                          11,  18, 25,  33,  40,  47,  54,  62,  69,  76,  83,  91,  98,  105, 112, 120, 127}));
  const std::vector<float> three{1.0F, -0.1F, 70000.0F};
  Bytes halves(6), narrow(6), wide(12);
  quantise(*find_gguf_type("F16"), three.data(), 3, halves.data());
  quantise(*find_gguf_type("BF16"), three.data(), 3, narrow.data());
  quantise(*find_gguf_type("F32"), three.data(), 3, wide.data());
  EXPECT_EQ(halves, (Bytes{0x00, 0x3C, 0x66, 0xAE, 0x00, 0x7C}));
  EXPECT_EQ(narrow, (Bytes{0x80, 0x3F, 0xCD, 0xBD, 0x89, 0x47}));
  EXPECT_EQ(std::memcmp(wide.data(), three.data(), wide.size()), 0);
}

}  // namespace
}  // namespace efla::io
