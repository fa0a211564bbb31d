// TOML as JSON, and where it is refused.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "efla/io/toml.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

TEST(Toml, BecomesJson) {
  const test::TempFolder folder;
  const auto path = test::write_text(folder / "a.toml", "x = 1\n[t]\ny = 2.5\nz = [true, \"a\"]\nt.u = -3\n");
  EXPECT_EQ(read_toml(path), nlohmann::json::parse(R"({"x": 1, "t": {"y": 2.5, "z": [true, "a"], "t": {"u": -3}}})"));
  EXPECT_TRUE(read_toml(path).at("x").is_number_integer());
  EXPECT_TRUE(parse_toml("x = 1e-3", "text").at("x").is_number_float());
}

TEST(Toml, NamesByteLineAndColumn) {
  test::expect_bad_content([] { parse_toml("x = 1\ny = \n", "f.toml"); }, 10, "line 2, column 5: ");
  test::expect_bad_content([] { parse_toml("x = 1\nx = 2\n", "f.toml"); }, 10, "line 2, column 5: ");
  test::expect_bad_content([] { parse_toml("\nx = 2026-11-21\n", "f.toml"); }, 5, "line 2, column 5: a date");
  test::expect_bad_content([] { parse_toml("x = ", "f.toml"); }, 4, "line 1, column 5: ");
  // A column is a character, which may have several bytes.
  test::expect_bad_content([] { parse_toml("\"\xe6\x9d\xb1\xc3\xa9\" = 2026-11-21", "f.toml"); }, 10,
                           "line 1, column 8: ");
}

}  // namespace
}  // namespace efla::io
