#include "efla/io/fields.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"

namespace efla::io {
namespace {

using nlohmann::json;
using test::expect_bad_content;
using test::expect_error;

const json kObject = {{"count", 3},      {"most", UINT64_MAX},  {"negative", -1},
                      {"rate", 0.5},     {"name", "a"},         {"on", true},
                      {"none", nullptr}, {"names", {"a", "b"}}, {"inner", {{"list", {{{"x", 1}}, {{"x", "y"}}}}}}};

TEST(Fields, AreRead) {
  const Fields fields(kObject, refuse_in_file("f.json"));
  EXPECT_EQ(fields.get<std::int64_t>("count"), 3);
  EXPECT_EQ(fields.get<std::int64_t>("count", 3, 3), 3);
  EXPECT_EQ(fields.get<std::uint64_t>("most"), UINT64_MAX);
  EXPECT_EQ(fields.get<double>("count"), 3.0);
  EXPECT_EQ(fields.get<double>("rate", 0.5, 1), 0.5);
  EXPECT_EQ(fields.find<bool>("on"), true);
  EXPECT_EQ(fields.find<bool>("off"), std::nullopt);
  EXPECT_EQ(fields.find<bool>("none"), std::nullopt);
  EXPECT_EQ(fields.get<std::vector<std::string>>("names"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(fields.object("inner").objects("list")[0].get<std::int64_t>("x"), 1);
  std::string name = "kept";
  std::optional<std::string> other = "kept", cleared = "cleared";
  fields.read("missing", name);
  fields.read("missing", other);
  fields.read("none", cleared);
  EXPECT_EQ(name + *other, "keptkept");
  EXPECT_EQ(cleared, std::nullopt);
  fields.read("name", name);
  EXPECT_EQ(name, "a");
}

TEST(Fields, NameFileFieldValueAndWhatIsExpected) {
  const Fields fields(kObject, refuse_in_file("f.json", "line 2: ", 7));
  const auto refused = [](const std::function<void()>& read, const std::string& says) {
    expect_bad_content(read, 7, "f.json: at byte 7: line 2: " + says);
  };
  refused([&] { fields.get<bool>("off"); }, "off: got nothing, expected true or false");
  refused([&] { fields.get<bool>("none"); }, "none: got null, expected true or false");
  refused([&] { fields.find<bool>("name"); }, "name: got \"a\", expected true or false");
  refused([&] { fields.get<std::int64_t>("rate"); }, "rate: got 0.5, expected a whole number below 2^63");
  refused([&] { fields.get<std::int64_t>("most"); },
          "most: got 18446744073709551615, expected a whole number below 2^63");
  refused([&] { fields.get<std::uint64_t>("negative"); }, "negative: got -1, expected a whole number from 0");
  refused([&] { fields.get<std::int64_t>("count", 4, 9); }, "count: got 3, expected a whole number from 4 to 9");
  refused([&] { fields.get<std::int64_t>("count", 4, 4); }, "count: got 3, expected 4");
  refused([&] { fields.get<std::int64_t>("count", 4, INT64_MAX); },
          "count: got 3, expected a whole number of at least 4");
  refused([&] { fields.get<double>("rate", 1, 2); }, "rate: got 0.5, expected a number from 1 to 2");
  refused([&] { fields.get<std::vector<std::string>>("name"); }, "name: got \"a\", expected a list of texts");
  refused([&] { fields.get<std::vector<std::int64_t>>("names"); },
          "names: got [\"a\",\"b\"], expected a list of whole numbers below 2^63");
  refused([&] { fields.object("name"); }, "name: got \"a\", expected an object");
  refused([&] { fields.objects("inner"); },
          "inner: got {\"list\":[{\"x\":1},{\"x\":\"y\"}]}, expected a list of objects");
  refused([&] { fields.object("inner").objects("list")[1].get<bool>("x"); },
          "inner.list[1].x: got \"y\", expected true");
  refused([&] { Fields(json("x"), refuse_in_file("f.json", "line 2: ", 7)); }, "got \"x\", expected an object");
}

TEST(Fields, NameTheFieldsOfErrors) {
  const Fields fields = Fields(kObject, refuse_in_file("f.json")).object("inner");
  EXPECT_EQ(fields.check([] { return 3; }), 3);
  expect_bad_content([&] { fields.check([] { throw Error("train", "lr", "5", "at most 1"); }); }, -1,
                     "f.json: inner.lr: got 5, expected at most 1");
  EXPECT_THROW(fields.check([] { throw std::runtime_error("another"); }), std::runtime_error);
}

TEST(Fields, NameAFieldThatNothingReads) {
  const json object = {{"number", 1}, {"name", std::string(200, 'x')}};
  const Fields fields(object, refuse_argument("train lm"), "model");
  fields.find("number");
  fields.find("nam");
  expect_error(
      [&] { fields.refuse_others(); }, "model.name",
      "train lm: model.name: got \"" + std::string(99, 'x') + "…, expected no such field (nearest: model.nam)");
  fields.find("name");
  EXPECT_NO_THROW(fields.refuse_others());
  expect_error([] { Fields(json(3), refuse_argument("train lm")); }, "content", "got 3, expected an object");
}

TEST(Fields, ANullFieldSaysNothing) {
  const json object = {{"number", 1}, {"unknown", nullptr}, {"inner", {{"unknown", nullptr}}}};
  const Fields fields(object, refuse_argument("train lm"));
  fields.find("number");
  EXPECT_NO_THROW(fields.object("inner").refuse_others());
  EXPECT_NO_THROW(fields.refuse_others());
}

TEST(Fields, AWholeNumberMayHaveAPoint) {
  const json object =
      json::parse(R"({"whole": 4.0, "negative": -1.0, "part": 4.5, "list": [1.0, 2], "most": 9007199254740992.0,
      "more": 9007199254740994.0, "huge": 1e300})");
  const Fields fields(object, refuse_in_file("f.json"));
  EXPECT_EQ(fields.get<std::int64_t>("whole"), 4);
  EXPECT_EQ(fields.get<std::int64_t>("whole", 1, INT64_MAX), 4);
  EXPECT_EQ(fields.get<std::uint64_t>("whole"), 4U);
  EXPECT_EQ(fields.get<std::int64_t>("negative"), -1);
  EXPECT_EQ(fields.get<std::int64_t>("most"), std::int64_t{1} << 53);
  EXPECT_EQ(fields.get<std::vector<std::int64_t>>("list"), (std::vector<std::int64_t>{1, 2}));
  for (const char* name : {"part", "more", "huge"}) {
    expect_bad_content([&] { fields.get<std::int64_t>(name); }, -1, "expected a whole number below 2^63");
  }
  expect_bad_content([&] { fields.get<std::uint64_t>("negative"); }, -1, "expected a whole number from 0");
  expect_bad_content([&] { fields.get<std::int64_t>("whole", 5, 9); }, -1, "got 4.0, expected a whole number from 5");
}

}  // namespace
}  // namespace efla::io
