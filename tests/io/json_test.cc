#include "efla/io/json.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <new>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/no_memory.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using nlohmann::ordered_json;
using test::expect_bad_content;
using test::read_text;
using test::TempFolder;
using test::write_text;

TEST(ReadJson, NamesTheByteWhereItBreaks) {
  const TempFolder folder;
  EXPECT_EQ(read_json(write_text(folder / "a", R"({"x": [1, 2.5]})"))["x"][1], 2.5);
  expect_bad_content([&] { read_json(write_text(folder / "b", R"({"x": [1, }])")); }, 10, "not JSON");
  expect_bad_content([&] { read_json(write_text(folder / "c", "")); }, 0, "not JSON");
  expect_bad_content([&] { read_json(write_text(folder / "d", "1e999")); }, 0, "beyond float64");
  expect_bad_content([&] { read_json(write_text(folder / "e", R"({"x": [1, -1e999]})")); }, 10, "beyond float64");
  expect_bad_content([&] { read_json(write_text(folder / "f", std::string(100'000, '['))); }, 257, "nested deeper");
}

TEST(ParseJson, ObjectsInAListTakeNoLongerThanLists) {
  const auto seconds = [](const std::string& value) {
    std::string text = "[" + value;
    for (int i = 1; i < 40'000; ++i) text += "," + value;
    text += "]";
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(parse_json(as_bytes(text), "text").size(), 40'000U);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double lists = seconds("[]"), objects = seconds("{}");
  for (int i = 0; i < 4; ++i) {
    lists = std::min(lists, seconds("[]"));
    objects = std::min(objects, seconds("{}"));
  }
  EXPECT_LT(objects, 8 * lists);  // hundreds of times as long if each object walked through the list
}

TEST(ParseJson, OfEqualNamesTheLastCounts) {
  EXPECT_EQ(parse_json(as_bytes(R"({"a": [[1], {"b": 2}], "a": {"c": [true, null, "x", -1, 2.5]}})"), "text"),
            (nlohmann::json{{"a", {{"c", {true, nullptr, "x", -1, 2.5}}}}}));
}

TEST(JsonDocument, ReportsItsMemoryBeforeItTakesIt) {
  std::string text = "[";
  for (int i = 0; i < 100'000; ++i) text += R"({"name": [1, "a text that is longer than a std::string"]},)";
  text.back() = ']';
  std::ptrdiff_t held = 0, most = 0;
  const auto hold = [&](std::ptrdiff_t bytes) { most = std::max(most, held += bytes); };
  {
    const JsonDocument document(as_bytes(text), "text", 0, hold);
    EXPECT_GT(held, 100'000 * 5 * static_cast<std::ptrdiff_t>(sizeof(nlohmann::json)));
  }
  EXPECT_EQ(held, 0);
  std::ptrdiff_t now = 0;
  const auto refuse = [&](std::ptrdiff_t bytes) {
    if (now + bytes > most / 2) throw std::bad_alloc();
    now += bytes;
  };
  EXPECT_THROW(JsonDocument(as_bytes(text), "text", 0, refuse), std::bad_alloc);
  EXPECT_EQ(now, 0);
  text.back() = ',';
  now = -most;
  expect_bad_content([&] { JsonDocument document(as_bytes(text), "text", 0, refuse); },
                     static_cast<std::int64_t>(text.size()), "not JSON");
  EXPECT_EQ(now, -most);
}

TEST(JsonDocument, EndsWithoutMemory) {
  const auto text = std::string(R"({"a": [[1, {}], [2, {"a": [[]]}]], "b": {"c": ["d"]}, "e": )") +
                    std::string(255, '[') + std::string(255, ']') + "}";
  auto document = std::make_unique<JsonDocument>(as_bytes(text), "text");
  const test::NoMemory none;
  document.reset();  // otherwise the process ends
}

TEST(JsonLines, AreWrittenAndReadBack) {
  const TempFolder folder;
  const auto path = folder / "m.jsonl";
  {
    JsonLinesWriter writer(path);
    writer.write({{"step", 1}, {"loss", 0.5}});
    EXPECT_EQ(read_text(path), "{\"step\":1,\"loss\":0.5}\n");  // there before the writer ends
    writer.write({{"loss", std::numeric_limits<double>::quiet_NaN()}, {"name", "bad \xff byte"}});
  }
  JsonLinesWriter(path).write({{"step", 2}});
  const auto lines = read_json_lines(path);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0]["loss"], 0.5);
  EXPECT_TRUE(lines[1]["loss"].is_null());
  EXPECT_EQ(lines[2]["step"], 2);
}

TEST(JsonText, ReplacesBytesThatAreNotUtf8) {
  EXPECT_EQ(to_json_text({{"name", "bad \xff byte"}}), "{\n  \"name\": \"bad \xef\xbf\xbd byte\"\n}\n");
}

TEST(JsonLines, ALineCutShortIsLeftOutAndCutOff) {
  const TempFolder folder;
  const auto path = write_text(folder / "m.jsonl", "{\"a\":1}\n{\"a\":");
  EXPECT_EQ(read_json_lines(path).size(), 1U);
  JsonLinesWriter(path).write({{"a", 2}});
  EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"a\":2}\n");
  write_text(path, "{\"a\":");
  JsonLinesWriter{path};
  EXPECT_EQ(read_text(path), "");
}

TEST(JsonLines, NameTheByteWhereTheyBreak) {
  const TempFolder folder;
  expect_bad_content([&] { read_json_lines(write_text(folder / "a", "{}\n{\"a\" 1}\n")); }, 8, "not JSON");
  expect_bad_content([&] { read_json_lines(write_text(folder / "b", "1\n\n2\n")); }, 2, "not JSON");
  expect_bad_content([&] { read_json_lines(write_text(folder / "c", "1\n[1e999]\n")); }, 3, "beyond float64");
}

TEST(JsonLines, AnUnwritableFileIsNamed) {
  const TempFolder folder;
  test::expect_io_error([&] { JsonLinesWriter{folder / "none" / "m"}; }, IoError::Kind::missing, -1,
                        "cannot open it for writing");
}

}  // namespace
}  // namespace efla::io
