#include "efla/io/safetensors/safetensors.h"

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "efla/io/sha256.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::expect_error;
using test::read_text;
using test::TempFolder;

// A file of the header given, its size before it, and data_bytes of data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string bytes;
  for (std::size_t i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i)));
  return bytes + header + std::string(data_bytes, 'd');
}

SafetensorsContent parse(const std::string& bytes) { return parse_safetensors(as_bytes(bytes), "x.safetensors"); }

// The header is refused with this message, at the byte where `mark` ends in the file.
void expect_refused(const std::string& header, std::size_t data_bytes, const std::string& mark,
                    const std::string& says) {
  const auto at = header.find(mark);
  ASSERT_NE(at, std::string::npos) << mark;
  SCOPED_TRACE(header);
  expect_bad_content([&] { parse(file_of(header, data_bytes)); }, static_cast<std::int64_t>(8 + at + mark.size() - 1),
                     says);
}

TEST(SafetensorsWriter, GivesTheExactBytesOfTheFormat) {
  const TempFolder folder;
  const std::string a = "12345678", b = "xyz";
  write_safetensors(folder / "f",
                    std::vector<NamedTensor>{{"w\"1", TensorType::F32, {2, 1}, as_bytes(a)},
                                             {"b", TensorType::BOOL, {3}, as_bytes(b)}},
                    {{"format", "pt"}});
  // The checksums were computed bit by bit in Python: of the metadata, of the first and of the second tensor.
  const std::string header = R"({"__metadata__":{"efla.crc32c":"719c1197e76e1aa974839b57","format":"pt"},)"
                             R"("w\"1":{"dtype":"F32","shape":[2,1],)"
                             R"("data_offsets":[0,8]},"b":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]}})";
  const auto text = read_text(folder / "f");
  EXPECT_EQ(text.substr(8, header.size()), header);
  EXPECT_EQ(text.size() % 8, 3U);  // 11 bytes of data behind a padded header
  EXPECT_EQ(text.substr(text.size() - 11), a + b);
  EXPECT_EQ(text.substr(8 + header.size(), text.size() - 19 - header.size()).find_first_not_of(' '), std::string::npos);
}

TEST(Safetensors, ComesBackAsItWasWritten) {
  const TempFolder folder;
  const std::string data(4096, '\x5a');
  std::vector<NamedTensor> tensors;
  const std::vector<TensorType> types{TensorType::F64,     TensorType::F32,     TensorType::F16, TensorType::BF16,
                                      TensorType::F8_E4M3, TensorType::F8_E5M2, TensorType::I64, TensorType::I32,
                                      TensorType::I16,     TensorType::I8,      TensorType::U64, TensorType::U32,
                                      TensorType::U16,     TensorType::U8,      TensorType::BOOL};
  for (const auto type : types) {
    EXPECT_EQ(type_from_name(type_name(type)), type);
    tensors.push_back({"t/" + std::string(type_name(type)), type, {3, 5}, as_bytes(data).first(15 * type_bytes(type))});
  }
  tensors.push_back({"scalar ü", TensorType::F32, {}, as_bytes("abcd")});
  tensors.push_back({"empty", TensorType::F64, {4, 0, 2}, {}});
  const std::map<std::string, std::string> metadata{{"step", "12"}, {"config", "{\"a\": \"\n\"}"}};
  write_safetensors(folder / "f", tensors, metadata);

  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = file.tensors()[i];
    EXPECT_EQ(t.name, tensors[i].name);
    EXPECT_EQ(t.type, tensors[i].type);
    EXPECT_EQ(t.shape, tensors[i].shape);
    ASSERT_EQ(t.bytes.size(), tensors[i].bytes.size());
    if (!t.bytes.empty()) {
      EXPECT_EQ(std::memcmp(t.bytes.data(), tensors[i].bytes.data(), t.bytes.size()), 0);
    }
    EXPECT_EQ(file.find(t.name), &t);
  }
  EXPECT_EQ(file.find("t/F"), nullptr);
}

// Every bit of a file is flipped. In the header a flip may also change nothing (a blank behind the JSON), or make a
// file that has no checksums (in their name).
TEST(Safetensors, AFlippedBitIsFoundAndNamed) {
  const auto whole = safetensors_bytes(std::vector<NamedTensor>{{"first", TensorType::F32, {2}, as_bytes("12345678")},
                                                                {"second", TensorType::U8, {3}, as_bytes("xyz")}},
                                       {{"format", "pt"}, {"held", "text"}});
  const auto data = whole.size() - 11;
  const auto metadata = parse(whole).metadata;
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    SCOPED_TRACE("bit " + std::to_string(bit));
    const std::size_t byte = bit / 8;
    std::string changed = whole;
    changed[byte] = static_cast<char>(changed[byte] ^ (1 << (bit % 8)));
    if (byte >= data) {
      const bool first = byte < data + 8;
      expect_bad_content([&] { parse(changed); }, static_cast<std::int64_t>(data + (first ? 0 : 8)),
                         first ? "tensor \"first\" is damaged" : "tensor \"second\" is damaged");
      continue;
    }
    try {
      const auto content = parse(changed);
      EXPECT_EQ(content.tensors[0].name + content.tensors[1].name, "firstsecond");
      EXPECT_TRUE(std::includes(content.metadata.begin(), content.metadata.end(), metadata.begin(), metadata.end()));
    } catch (const IoError&) {
    }
  }
}

TEST(Safetensors, ChecksumsAreOfTheFileAndNotOfItsMetadata) {
  const NamedTensor tensor{"a", TensorType::F32, {1}, as_bytes("abcd")};
  const auto bytes = safetensors_bytes({&tensor, 1}, {{"format", "pt"}, {"signature", "0"}});
  const auto content = parse(bytes);
  EXPECT_EQ(content.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"signature", "0"}}));
  EXPECT_EQ(safetensors_bytes(content.tensors, content.metadata), bytes);
  auto signed_bytes = bytes;
  signed_bytes.replace(bytes.find("\"0\""), 3, "\"1\"");
  EXPECT_EQ(parse(signed_bytes).metadata.at("signature"), "1");
}

TEST(SafetensorsReader, RefusesChecksumsOfAnotherFile) {
  const auto with = [](const std::string& digits) {
    return file_of(
        R"({"__metadata__":{"efla.crc32c":")" + digits + R"("},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
        2);
  };
  expect_bad_content([&] { parse(with("0000000000000000")); },
                     static_cast<std::int64_t>(with("0000000000000000").size() - 2),
                     "tensor \"a\" is damaged: its checksum differs; a program that changes such a file");
  expect_bad_content([&] { parse(with("0000000100000000")); }, -1, "the metadata is damaged");
  expect_bad_content([&] { parse(with("")); }, -1, "has 0 digits of checksums, expected 8 for each of 1 tensors");
}

TEST(Safetensors, NoTensorsIsAFileToo) {
  const TempFolder folder;
  write_safetensors(folder / "f", {});
  EXPECT_TRUE(SafetensorsFile(folder / "f").tensors().empty());
}

TEST(SafetensorsWriter, RefusesWhatTheFormatCannotHold) {
  const TempFolder folder;
  const auto write = [&](std::vector<NamedTensor> tensors) { write_safetensors(folder / "f", tensors); };
  const NamedTensor good{"a", TensorType::F32, {1}, as_bytes("abcd")};
  expect_error([&] { write({good, good}); }, "name", "got a, expected a name that is not taken");
  expect_error([&] { write({{"__metadata__", TensorType::U8, {4}, as_bytes("abcd")}}); }, "name", "not taken");
  expect_error([&] { write({{"b\xff", TensorType::U8, {4}, as_bytes("abcd")}}); }, "name or metadata", "UTF-8");
  expect_error(
      [&] {
        write({{"b", TensorType::F32, {2, 3}, as_bytes("abcd")}});
      },
      "b", "got 4 bytes, expected those of F32 [2, 3]");
  expect_error([&] { write({{"b", TensorType::U8, {-1, -4}, as_bytes("abcd")}}); }, "b", "[-1, -4]");
  expect_error([&] { write({{"b", TensorType::F32, {1LL << 32, 1LL << 32}, {}}}); }, "b", "got 0 bytes");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(SafetensorsReader, OrdersTensorsByTheirData) {
  const auto bytes = file_of(R"({"b":{"data_offsets":[4,6],"shape":[2],"dtype":"U8"},"__metadata__":{},)"
                             R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   )",
                             6);
  const auto content = parse(bytes);
  ASSERT_EQ(content.tensors.size(), 2U);
  EXPECT_EQ(content.tensors[0].name, "a");
  EXPECT_EQ(content.tensors[1].name, "b");
  EXPECT_EQ(content.tensors[1].bytes.data(), as_bytes(bytes).data() + bytes.size() - 2);
}

TEST(SafetensorsReader, FindsEveryCut) {
  const TempFolder folder;
  write_safetensors(folder / "f", std::vector<NamedTensor>{{"a", TensorType::F32, {1}, as_bytes("abcd")}});
  const auto whole = read_text(folder / "f");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(parse(whole.substr(0, size)), IoError) << size;
  }
  expect_bad_content([&] { parse(whole.substr(0, 5)); }, 5, "size of the safetensors header is cut short");
  expect_bad_content([&] { parse(whole.substr(0, 20)); }, 20, "the header is cut short: 12 bytes of");
  expect_bad_content([&] { parse(whole.substr(0, whole.size() - 1)); },
                     static_cast<std::int64_t>(whole.find("\"a\"") + 2), "end beyond the 3 bytes of data");
  expect_bad_content([&] { parse(whole + "zz"); }, static_cast<std::int64_t>(whole.size()), "2 bytes after the end");
}

TEST(SafetensorsReader, RefusesAbsurdAndForeignHeaders) {
  expect_bad_content([] { parse(std::string(8, '\xff') + "{}"); }, 0, "a header of 18446744073709551615 bytes");
  expect_bad_content([] { parse(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8)); }, 0, "a header of 100000001 bytes");
  expect_bad_content([] { parse(file_of("", 0)); }, 8, "does not begin with {");
  expect_bad_content([] { parse(file_of("[1]", 0)); }, 8, "does not begin with {");
  expect_bad_content([] { parse(file_of("{\"a\" 1}", 0)); }, 13, "the header is not JSON");
  expect_bad_content([] { parse(file_of("{} {}", 0)); }, 11, "the header is not JSON");
  expect_bad_content([] { parse(file_of("{\"\xff\":1}", 0)); }, 10, "the header is not JSON");
  expect_bad_content([] { parse(file_of("{\"a\":" + std::string(1'000'000, '['), 0)); }, 13,
                     "array where none belongs");
}

TEST(SafetensorsReader, RefusesEntriesOfTheWrongForm) {
  const std::string good = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  EXPECT_EQ(parse(file_of("{" + good + "}", 2)).tensors.size(), 1U);
  expect_refused("{" + good + "," + good + "}", 4, good + ",\"a\"", "the name \"a\" occurs twice");
  expect_refused(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,2]}})", 2, "\"F33\"", "unknown dtype \"F33\"");
  expect_refused(R"({"a":{"dtype":"U8","dtype":"U8"}})", 2, "\"U8\",\"dtype\"", "the field \"dtype\" twice");
  expect_refused(R"({"a":{"dtype":"U8","stride":[2]}})", 2, "\"stride\"", "the unknown field \"stride\"");
  expect_refused(R"({"a":{"dtype":"U8","shape":[2]}})", 2, "[2]}", "has no data_offsets");
  expect_refused(R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", 2, "[0,2]}", "has no shape");
  expect_refused(R"({"a":{"shape":[2],"data_offsets":[0,2]}})", 2, "[0,2]}", "has no dtype");
  expect_refused(R"({"a":{"data_offsets":[0]}})", 2, "[0]", "data_offsets that are not two numbers");
  expect_refused(R"({"a":{"data_offsets":[0,1,2]}})", 2, "[0,1,2]", "data_offsets that are not two numbers");
  expect_refused(R"({"a":{"data_offsets":3}})", 2, ":3}", "a JSON number where none belongs");
  expect_refused(R"({"a":{"shape":[-2]}})", 2, "[-2]", "a negative number");
  expect_refused(R"({"a":{"shape":[2.5]}})", 2, "[2.5]", "not a 64-bit integer");
  expect_refused(R"({"a":{"shape":[18446744073709551616]}})", 2, "6]", "not a 64-bit integer");
  expect_refused(R"({"a":{"shape":[9223372036854775808]}})", 2, "8]", "an extent beyond 63 bits");
  expect_refused(R"({"a":{"shape":[[2]]}})", 2, "[[", "a JSON array where none belongs");
  expect_refused(R"({"a":{"shape":{}}})", 2, "shape\":{", "a JSON object where none belongs");
  expect_refused(R"({"a":{"shape":"2"}})", 2, "\"2\"", "a JSON string where none belongs");
  expect_refused(R"({"a":{"dtype":null}})", 2, "null", "a JSON null");
  expect_refused(R"({"a":{"dtype":true}})", 2, "true", "a JSON boolean");
  expect_refused(R"({"a":5})", 2, "5}", "a JSON number");
  expect_refused(R"({"__metadata__":{"a":"b","a":"c"}})", 0, "\"b\",\"a\"", "the key \"a\" occurs twice");
  expect_refused(R"({"__metadata__":{"a":1}})", 0, "1}", "a JSON number");
  expect_refused(R"({"__metadata__":{"a":{}}})", 0, "a\":{", "a JSON object");
}

TEST(SafetensorsReader, RefusesDataThatDoesNotFit) {
  const auto tensor = [](const char* name, const char* type, const char* shape, const char* offsets) {
    return std::string("\"") + name + R"(":{"dtype":")" + type + R"(","shape":[)" + shape + R"(],"data_offsets":[)" +
           offsets + "]}";
  };
  const auto one = [&](const char* type, const char* shape, const char* offsets) {
    return "{" + tensor("a", type, shape, offsets) + "}";
  };
  expect_refused(one("U8", "2", "2,0"), 2, "\"a\"", "[2, 0] run backwards");
  expect_refused(one("U8", "3", "0,3"), 2, "\"a\"", "end beyond the 2 bytes of data in the file");
  expect_refused(one("U8", "2", "0,18446744073709551615"), 2, "\"a\"", "end beyond");
  expect_refused(one("F32", "2", "0,4"), 4, "\"a\"", "hold 4 bytes, but the shape needs 8");
  expect_refused(one("F32", "4294967296,4294967296", "0,4"), 4, "\"a\"", "its size overflows 64 bits");
  expect_refused(one("F64", "2305843009213693952", "0,4"), 4, "\"a\"", "its size overflows 64 bits");
  expect_refused(one("U8", "2", "1,3"), 3, "\"a\"", "leave a gap: the data before it ends at 0");
  expect_refused("{" + tensor("a", "U8", "3", "0,3") + "," + tensor("b", "U8", "2", "2,4") + "}", 4, "\"b\"",
                 "tensor \"b\": data_offsets [2, 4] overlap");
  expect_refused("{" + tensor("a", "U8", "3", "0,3") + "," + tensor("b", "U8", "3", "0,3") + "}", 3, "\"b\"",
                 "overlap");
}

TEST(Sha256, AgreesWithTheStandard) {
  EXPECT_EQ(sha256({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256(as_bytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(as_bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(as_bytes(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace efla::io
