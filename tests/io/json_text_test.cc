// JSON that replies are written in.
#include "efla/io/json_text.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tests/support/no_memory.h"

namespace efla::io {
namespace {

TEST(JsonText, WritesWhatAReaderOfJsonReads) {
  JsonText list = JsonText::array();
  list.push_back(1);
  list.push_back(JsonText::object());
  list.push_back("a");
  JsonText value{{"list", list}, {"none", nullptr}, {"yes", true}, {"inner", {{"x", -0.25F}, {"y", 3.0}}}};
  value.add("id", std::uint64_t{18446744073709551615U});
  value.add_all({{"more", JsonText::array()}});
  value.add_all(JsonText::object());
  EXPECT_EQ(
      value.text(),
      R"({"list":[1,{},"a"],"none":null,"yes":true,"inner":{"x":-0.25,"y":3.0},"id":18446744073709551615,"more":[]})");
  EXPECT_EQ(JsonText(std::numeric_limits<float>::quiet_NaN()).text(), "null");
}

TEST(JsonText, EveryTextAndNumberIsReadBack) {
  std::string text;
  for (int c = 0; c < 128; ++c) text += static_cast<char>(c);
  text += "\u00e9\u20ac\U0001F600";
  EXPECT_EQ(nlohmann::json::parse(JsonText(text).text()), text);
  for (const std::string bad : {"\xff", "a\xc3", "\xe2\x82", "\xed\xa0\x80z", "\xf0\x9f\x98"}) {
    EXPECT_EQ(JsonText(bad).text(), nlohmann::json(nlohmann::json::parse(JsonText(bad).text())).dump()) << bad;
    EXPECT_NE(JsonText(bad).text().find("\xef\xbf\xbd"), std::string::npos);
  }
  for (const double number : {0.0, 1e300, 5e-324, 0.1, -1234567.0, 1e15, 123456789012345680.0}) {
    const auto read = nlohmann::json::parse(JsonText(number).text());
    EXPECT_TRUE(read.is_number_float()) << read;
    EXPECT_EQ(read.get<double>(), number);
  }
}

TEST(JsonText, EndsWithoutMemory) {
  auto value =
      std::make_unique<JsonText>(JsonText{{"a", {{"b", {{"c", "a text that is longer than a std::string"}}}}}});
  const test::NoMemory none;
  value.reset();
}

}  // namespace
}  // namespace efla::io
