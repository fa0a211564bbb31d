#include "efla/io/gzip.h"

#include <zlib.h>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::gzip;
using test::sample;
using test::TempFolder;
using test::write_text;

constexpr std::size_t kBound = 1 << 24;

std::string unpack(const std::string& packed, std::size_t bound = kBound) {
  const auto bytes = gunzip(as_bytes(packed), "x.gz", bound);
  return {bytes.begin(), bytes.end()};
}

TEST(Gunzip, UnpacksWhatWasPacked) {
  for (const std::size_t size : {0U, 1U, 65'535U, 65'536U, 65'537U, 1'000'000U}) {
    const auto text = sample(size);
    EXPECT_EQ(unpack(gzip(text)), text) << size;
    EXPECT_EQ(unpack(gzip(text), size), text) << size;
  }
  EXPECT_EQ(unpack(gzip("one ") + gzip("two ") + gzip("") + gzip("three")), "one two three");
}

TEST(Gunzip, NeverUnpacksBeyondTheBound) {
  const auto packed = gzip(std::string(50'000'000, 'x'));
  ASSERT_LT(packed.size(), 60'000U);
  for (const std::size_t bound : {std::size_t{0}, std::size_t{1}, std::size_t{65'536}, std::size_t{49'999'999}}) {
    try {
      unpack(packed, bound);
      ADD_FAILURE() << "nothing thrown";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("more than " + std::to_string(bound)), std::string::npos);
      EXPECT_GT(error.offset(), 0);
      EXPECT_LE(error.offset(), static_cast<std::int64_t>(packed.size()));
    }
  }
}

TEST(Gunzip, EveryCutIsFoundAtTheCut) {
  const auto packed = gzip(sample(300));
  for (std::size_t size = 0; size < packed.size(); ++size) {
    expect_bad_content([&] { unpack(packed.substr(0, size)); }, static_cast<std::int64_t>(size), "cut short");
  }
}

TEST(Gunzip, CorruptionIsFound) {
  const auto text = sample(300);
  const auto packed = gzip(text);
  int unused_bits = 0;
  for (std::size_t i = 10; i < packed.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto bad = packed;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      try {
        EXPECT_EQ(unpack(bad), text) << "byte " << i << ", bit " << bit;
        ++unused_bits;
      } catch (const IoError&) {
      }
    }
  }
  EXPECT_LT(unused_bits, 8);  // those that fill the last byte of the deflate stream
  auto bad = packed;
  bad[bad.size() - 8] ^= 1;  // of the checksum
  expect_bad_content([&] { unpack(bad); }, static_cast<std::int64_t>(packed.size() - 4), "incorrect data check");
}

TEST(Gunzip, ForeignAndTrailingBytesAreFound) {
  expect_bad_content([&] { unpack("plain text"); }, 2, "incorrect header check");
  const auto packed = gzip("text");
  expect_bad_content([&] { unpack(packed + "more"); }, static_cast<std::int64_t>(packed.size()), "after the end");
}

TEST(ReadMaybeGzip, TellsByTheMagicNumber) {
  const TempFolder folder;
  const auto packed = read_maybe_gzip(write_text(folder / "packed", gzip("text")), 100);
  EXPECT_TRUE(packed.packed);
  EXPECT_EQ(std::string(packed.bytes.begin(), packed.bytes.end()), "text");
  const auto plain = read_maybe_gzip(write_text(folder / "plain.gz", "text"), 100);
  EXPECT_FALSE(plain.packed);
  EXPECT_EQ(plain.bytes.size(), 4U);
  expect_bad_content([&] { read_maybe_gzip(folder / "plain.gz", 3); }, 3, "at most 3 bytes");
}

}  // namespace
}  // namespace efla::io
