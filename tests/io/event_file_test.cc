// TensorBoard's event files: checksums, framing and messages, byte for byte.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "efla/io/event_file.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::read_text;
using test::TempFolder;

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

// The bytes that tensorboard.summary.writer.record_writer and tensorboard's event_pb2 (2.21) make of the same values.
TEST(EventFile, RecordsAndMessagesAreTensorBoards) {
  EXPECT_EQ(hex(tf_record("abc")), "0300000000000000b099490e6162636e57f121");
  EXPECT_EQ(hex(version_event(1.5)), "09000000000000f83f1a0d627261696e2e4576656e743a32");
  EXPECT_EQ(hex(start_event(1.5, 300)), "09000000000000f83f10ac023a020801");
  const std::array<Scalar, 2> scalars{{{"train/loss", 2.5F}, {"train/lr", -1e-3F}}};
  EXPECT_EQ(hex(scalars_event(1.5, 300, scalars)),
            "09000000000000f83f10ac022a240a110a0a747261696e2f6c6f737315000020400a0f0a08747261696e2f6c72156f1283ba");
}

TEST(EventFile, HoldsTheVersionAndTheStartFirst) {
  const TempFolder folder;
  {
    EventFile file(folder.path(), 7);
    file.write(7, std::array<Scalar, 1>{{{"x", 1.0F}}});
  }
  ASSERT_EQ(folder.files(), 1U);
  const auto path = std::filesystem::directory_iterator(folder.path())->path();
  EXPECT_TRUE(path.filename().string().starts_with("events.out.tfevents.")) << path;
  const std::string text = read_text(path);
  const auto version = text.find("brain.Event:2"), scalar = text.find("\x0a\x01x");
  ASSERT_NE(version, std::string::npos);
  ASSERT_NE(scalar, std::string::npos);
  EXPECT_LT(version, scalar);
}

}  // namespace
}  // namespace efla::io
