// CRC-32C with the processor's instruction and without.
#include "efla/io/crc32c.h"

#include <gtest/gtest.h>

namespace efla::io {
namespace {

TEST(Crc32c, IsThatOfRfc3720) {
  for (auto* sum : {&crc32c, &crc32c_portable}) {
    EXPECT_EQ(sum(as_bytes("123456789"), 0), 0xE3069283U);
    EXPECT_EQ(sum(Bytes(32, 0x00), 0), 0x8A9136AAU);
    EXPECT_EQ(sum(Bytes(32, 0xFF), 0), 0x62A8AB43U);
    EXPECT_EQ(sum({}, 0), 0U);
  }
}

TEST(Crc32c, ContinuesAtEveryPlace) {
  Bytes bytes(41);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(31 * i + 7);
  const ByteView all(bytes);
  for (std::size_t begin = 0; begin <= all.size(); ++begin) {
    const auto whole = crc32c(all.subspan(begin));
    EXPECT_EQ(whole, crc32c_portable(all.subspan(begin)));
    for (std::size_t cut = begin; cut <= all.size(); ++cut) {
      const auto head = all.subspan(begin, cut - begin), tail = all.subspan(cut);
      EXPECT_EQ(crc32c(tail, crc32c(head)), whole);
      EXPECT_EQ(crc32c_portable(tail, crc32c_portable(head)), whole);
    }
  }
}

}  // namespace
}  // namespace efla::io
