#include "efla/io/idx.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/idx.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::idx_bytes;
using test::TempFolder;
using test::write_text;

IdxImages images(const std::string& bytes) { return parse_idx_images(as_bytes(bytes), "images"); }
Bytes labels(const std::string& bytes) { return parse_idx_labels(as_bytes(bytes), "labels"); }

TEST(Idx, ReadsImagesAndLabels) {
  const auto read = images(idx_bytes(0x803, {2, 1, 3}, "abcdef"));
  EXPECT_EQ(read.count, 2);
  EXPECT_EQ(read.rows, 1);
  EXPECT_EQ(read.cols, 3);
  EXPECT_EQ(std::string(read.pixels.begin(), read.pixels.end()), "abcdef");
  EXPECT_EQ(labels(idx_bytes(0x801, {3}, {"\0\1\2", 3})), (Bytes{0, 1, 2}));
  EXPECT_EQ(images(idx_bytes(0x803, {0, 28, 28}, "")).count, 0);
}

TEST(Idx, ForeignMagicNumbersAreNamed) {
  expect_bad_content([] { images(idx_bytes(0x801, {3}, "abc")); }, 0,
                     "magic number is 00000801, expected 00000803 (IDX images)");
  expect_bad_content([] { labels(idx_bytes(0x803, {1, 1, 1}, "a")); }, 0, "expected 00000801 (IDX labels)");
}

TEST(Idx, EveryCutIsFoundAtTheCut) {
  for (const auto& [whole, header] :
       {std::pair{idx_bytes(0x803, {2, 1, 3}, "abcdef"), 16U}, std::pair{idx_bytes(0x801, {3}, "abc"), 8U}}) {
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const auto cut = whole.substr(0, size);
      expect_bad_content([&] { header == 16U ? void(images(cut)) : void(labels(cut)); },
                         static_cast<std::int64_t>(size), "cut short");
    }
  }
}

TEST(Idx, TrailingBytesAreFound) {
  expect_bad_content(
      [] {
        images(idx_bytes(0x803, {2, 1, 3}, "abcdefgh"));
      },
      22, "2 bytes after the end of the images");
  expect_bad_content([] { labels(idx_bytes(0x801, {2}, "abc")); }, 10, "1 bytes after the end of the labels");
}

TEST(Idx, AbsurdExtentsAreFoundBeforeAnythingIsAllocated) {
  expect_bad_content(
      [] {
        images(idx_bytes(0x803, {0xffffffff, 0xffffffff, 0xffffffff}, "abc"));
      },
      12, "overflows 64 bits");
  expect_bad_content(
      [] {
        images(idx_bytes(0x803, {0xffffffff, 0xffffffff, 1}, "abc"));
      },
      19, "3 bytes of 18446744065119617025");
  expect_bad_content([] { labels(idx_bytes(0x801, {0xffffffff}, "abc")); }, 11, "3 bytes of 4294967295");
  expect_bad_content([] { images(idx_bytes(0x803, {0xffffffff, 0, 28}, "")); }, 8, "without pixels");
  expect_bad_content([] { images(idx_bytes(0x803, {0xffffffff, 28, 0}, "")); }, 12, "without pixels");
}

TEST(Idx, ReadsFilesPlainAndPacked) {
  const TempFolder folder;
  const auto bytes = idx_bytes(0x803, {1, 2, 2}, "abcd");
  EXPECT_EQ(read_idx_images(write_text(folder / "plain", bytes)).pixels.size(), 4U);
  EXPECT_EQ(read_idx_images(write_text(folder / "packed.gz", test::gzip(bytes))).pixels.size(), 4U);
  EXPECT_EQ(read_idx_labels(write_text(folder / "l", test::gzip(idx_bytes(0x801, {1}, "a")))).size(), 1U);
  expect_bad_content([&] { read_idx_images(write_text(folder / "cut", test::gzip(bytes.substr(0, 18)))); }, 18,
                     "(unpacked): at byte 18: images data is cut short");
}

}  // namespace
}  // namespace efla::io
