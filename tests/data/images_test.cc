#include "efla/data/images.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "efla/io/file.h"
#include "efla/io/sha256.h"
#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/idx.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using test::expect_bad_content;
using test::expect_io_error;
using test::idx_bytes;
using test::TempFolder;
using test::write_text;

void write_images(const TempFolder& folder, const std::string& name) {
  write_text(folder / name, idx_bytes(0x803, {2, 1, 3}, "abcdef"));
}

void write_labels(const TempFolder& folder, const std::string& name, std::string_view labels) {
  write_text(folder / name, idx_bytes(0x801, {static_cast<std::uint32_t>(labels.size())}, labels));
}

TEST(LoadMnist, ReadsEachSplitPlainOrPacked) {
  const TempFolder folder;
  write_images(folder, "train-images-idx3-ubyte");
  write_text(folder / "train-labels-idx1-ubyte.gz", test::gzip(idx_bytes(0x801, {2}, "\7\11")));
  const auto set = load_mnist(folder.path(), Split::train);
  EXPECT_EQ(set.count, 2);
  EXPECT_EQ(set.rows, 1);
  EXPECT_EQ(set.cols, 3);
  EXPECT_EQ(std::string(set.pixels.begin(), set.pixels.end()), "abcdef");
  EXPECT_EQ(set.labels, (std::vector<std::uint8_t>{7, 9}));

  write_images(folder, "t10k-images-idx3-ubyte");
  write_labels(folder, "t10k-labels-idx1-ubyte", "\1\2");
  EXPECT_EQ(load_mnist(folder.path(), Split::test).labels, (std::vector<std::uint8_t>{1, 2}));
}

TEST(LoadMnist, NamesWhatItLookedFor) {
  const TempFolder folder;
  expect_io_error([&] { load_mnist(folder.path(), Split::train); }, IoError::Kind::missing, -1,
                  folder.path().string() + ": holds neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz");
  write_images(folder, "t10k-images-idx3-ubyte");
  expect_io_error([&] { load_mnist(folder.path(), Split::test); }, IoError::Kind::missing, -1,
                  "holds neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz");
  expect_io_error([&] { load_mnist(folder / "none", Split::test); }, IoError::Kind::missing, -1, "no such folder");
}

TEST(LoadMnist, FindsImagesAndLabelsThatDoNotBelongTogether) {
  const TempFolder folder;
  const auto load = [&] { load_mnist(folder.path(), Split::train); };
  write_images(folder, "train-images-idx3-ubyte");
  write_labels(folder, "train-labels-idx1-ubyte", "\1\2\3");
  expect_bad_content(load, -1, "holds 3 labels, expected 2, the number of images");
  write_labels(folder, "train-labels-idx1-ubyte", "\1\12");
  expect_bad_content(load, 9, "label 1 is 10, expected 0 to 9");
  write_text(folder / "train-images-idx3-ubyte", idx_bytes(0x803, {0, 28, 28}, ""));
  expect_bad_content(load, -1, "holds no images");
}

TEST(LoadMnist, ReadsTheRealOne) {
  const std::filesystem::path folder = EFLA_SHARED_DATA;
  if (!std::filesystem::exists(folder / "t10k-images-idx3-ubyte.gz")) GTEST_SKIP() << "no MNIST in " << folder;
  const auto set = load_mnist(folder, Split::test);
  EXPECT_EQ(set.count, 10'000);
  EXPECT_EQ(set.rows, 28);
  EXPECT_EQ(set.cols, 28);
  EXPECT_EQ(set.pixels.size(), 10'000U * 784U);
  EXPECT_EQ((std::vector<std::uint8_t>(set.labels.begin(), set.labels.begin() + 5)),
            (std::vector<std::uint8_t>{7, 2, 1, 0, 4}));
}

}  // namespace
}  // namespace efla::data
