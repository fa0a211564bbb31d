#include "efla/io/unpack.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/pack.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::sample;
using test::TempFolder;
using test::write_text;

// All of it, `in` and `out` bytes at a time.
std::string unpack(const std::string& packed, std::size_t in, std::size_t out) {
  const auto unpacker = make_unpacker(packing_of(as_bytes(packed)), "x");
  std::string text;
  Bytes buffer(out);
  ByteView rest = as_bytes(packed);
  for (;;) {
    auto part = rest.first(std::min(in, rest.size()));
    const auto before = part.size();
    const auto count = unpacker->unpack(part, before == rest.size(), buffer);
    rest = rest.subspan(before - part.size());
    text.append(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
    if (count == 0 && rest.empty()) return text;
  }
}

struct Format {
  const char* name;
  Packing packing;
  std::string (*pack)(std::string_view);
};

void PrintTo(const Format& format, std::ostream* out) { *out << format.name; }

class Unpack : public testing::TestWithParam<Format> {};

TEST_P(Unpack, GivesWhatWasPackedHoweverItIsCut) {
  const auto pack = GetParam().pack;
  EXPECT_EQ(packing_of(as_bytes(pack("x"))), GetParam().packing);
  for (const std::size_t size : {0U, 1U, 1000U, 70'000U}) {
    const auto text = sample(size);
    EXPECT_EQ(unpack(pack(text), SIZE_MAX, 1 << 20), text);
    EXPECT_EQ(unpack(pack(text), 7, 1000), text);
    EXPECT_EQ(unpack(pack(text), SIZE_MAX, 3), text);
    EXPECT_EQ(unpack(pack(text) + pack("") + pack("more"), 11, 4096), text + "more");
  }
}

TEST_P(Unpack, FindsEveryCutAndWhatFollows) {
  const auto packed = GetParam().pack(sample(1000));
  // Too few bytes to see the packing are a text.
  for (std::size_t size = 6; size < packed.size(); ++size) {
    EXPECT_THROW(unpack(packed.substr(0, size), SIZE_MAX, 4096), IoError) << size;
    EXPECT_THROW(unpack(packed.substr(0, size), 5, 100), IoError) << size;
  }
  expect_bad_content([&] { unpack(packed.substr(0, packed.size() - 1), SIZE_MAX, 4096); },
                     static_cast<std::int64_t>(packed.size() - 1), "stream is cut short");
  EXPECT_THROW(unpack(packed + "something else", SIZE_MAX, 4096), IoError);
}

TEST_P(Unpack, FindsChangedBytes) {
  const auto packed = GetParam().pack(sample(3000));
  int found = 0;
  for (std::size_t at = 8; at < packed.size(); at += 7) {
    auto changed = packed;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    try {
      found += unpack(changed, SIZE_MAX, 4096) != sample(3000);
    } catch (const IoError& error) {
      EXPECT_EQ(error.kind(), IoError::Kind::content);
      EXPECT_LE(error.offset(), static_cast<std::int64_t>(packed.size()));
      ++found;
    }
  }
  EXPECT_GT(found, 0);
}

TEST_P(Unpack, ReadsFiles) {
  const TempFolder folder;
  const auto text = sample(1'000'000);
  const auto packed = GetParam().pack(text);
  UnpackedFile file(write_text(folder / "f", packed));
  EXPECT_EQ(file.packing(), GetParam().packing);
  std::string got;
  Bytes buffer(99'999);
  for (std::size_t count = buffer.size(); count == buffer.size();) {
    count = file.read(buffer);
    got.append(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
  }
  EXPECT_EQ(got, text);
  EXPECT_EQ(file.position(), packed.size());
}

INSTANTIATE_TEST_SUITE_P(All, Unpack,
                         testing::Values(Format{"gzip", Packing::gzip, [](auto t) { return test::gzip(t); }},
                                         Format{"xz", Packing::xz, [](auto t) { return test::xz(t); }},
                                         Format{"zstd", Packing::zstd, [](auto t) { return test::zstd(t); }}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(UnpackedFile, ReadsPlainOnesAndNamesMissingOnes) {
  const TempFolder folder;
  UnpackedFile file(write_text(folder / "f", "plain"));
  Bytes buffer(100);
  EXPECT_EQ(file.read(buffer), 5U);
  EXPECT_EQ(file.read(buffer), 0U);
  test::expect_io_error([&] { UnpackedFile(folder / "none"); }, IoError::Kind::missing, -1, "cannot open it");
  expect_bad_content([&] { UnpackedFile{folder.path()}; }, -1, "is a folder");
}

}  // namespace
}  // namespace efla::io
