// The stored texts by themselves: what callers that need room at once count.
#include "efla/engine/session_store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

SessionFormat no_format() {
  return SessionFormat({}, [](std::int64_t) { return StateLayout{.parts = {{"", {}, 0, 0}}}; });
}

TEST(SessionStore, ATextOfTwoNamesMovesOnce) {
  const test::TempFolder folder;
  constexpr std::size_t kFloats = 1 << 16, kBytes = kFloats * sizeof(float), kRecords = 4096;
  const auto swap = folder / "swap", number = folder / "number";
  SessionStore store({.memory = 3 * kBytes + kRecords, .swap = swap}, no_format());
  const auto put = [&](const std::string& name) {
    auto text = std::make_shared<StoredText>();
    text->state = store.stored({0, std::make_shared<std::vector<float>>(kFloats)});
    store.store(store.reserve(name, kBytes), text, false, [](const std::string&) {});
  };
  put("text");
  store.fork("text", "copy");
  put("other");
  // The next file's name is that of a pipe, so that writing it waits for a reader.
  std::filesystem::create_directory(number);
  Stored<std::vector<float>> before(std::vector<float>(1));
  before.claim();
  before.swap_out(number);
  const std::string file = std::filesystem::directory_iterator(number)->path().filename();
  const auto digits = file.find('-') + 1;
  const auto pipe = swap / (file.substr(0, digits) + std::to_string(std::stoull(file.substr(digits)) + 1) + kSwapEnd);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);

  SessionStore::Reservation a, b;
  std::thread first([&] { a = store.reserve("a", 2 * kBytes); });
  while (store.bytes().moving == 0) std::this_thread::yield();
  std::thread second([&] { b = store.reserve("b", kBytes); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until it waits for the same file
  const auto c = store.reserve("c", 1);
  EXPECT_FALSE(store.info("other").in_memory);
  std::ifstream in(pipe, std::ios::binary);
  const std::string written(std::istreambuf_iterator<char>(in), {});
  EXPECT_EQ(written.size(), kBytes);
  first.join();
  second.join();
  EXPECT_EQ(store.bytes().moving, 0U);
  EXPECT_EQ(store.bytes().files, 2 * kBytes);
}

TEST(SessionStore, SaysWhatIsWrongWithASwapFile) {
  const test::TempFolder folder;
  const auto swap = folder / "swap";
  const auto failure = [](auto call) {
    try {
      call();
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::vector<float> values{1.0F, 2.0F};
  Stored<std::vector<float>> state(values);
  EXPECT_TRUE(state.claim());
  EXPECT_FALSE(state.claim());
  EXPECT_NE(failure([&] { state.swap_out(swap); }).find("No such file"), std::string::npos);
  EXPECT_TRUE(state.in_memory());
  std::filesystem::create_directory(swap);
  state.swap_out(swap);
  EXPECT_EQ(*state.get(), values);
  const auto file = std::filesystem::directory_iterator(swap)->path();
  auto bytes = test::read_text(file);
  bytes[3] = static_cast<char>(bytes[3] ^ 1);
  test::write_text(file, bytes);
  EXPECT_NE(failure([&] { state.get(); }).find("the checksum differs"), std::string::npos);
  std::filesystem::resize_file(file, 6);
  EXPECT_NE(failure([&] { state.get(); }).find("6 bytes, expected 8"), std::string::npos);
}

TEST(SessionStore, LocksItsFolderAndRemovesWhatAKilledProcessLeft) {
  const test::TempFolder folder;
  const auto left = folder / ("1-0" + std::string(kSwapEnd)), notes = folder / "state-of-things";
  for (const auto& file : {left, notes}) std::ofstream(file) << "text";
  const SessionStore store({.swap = folder.path()}, no_format());
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(notes));
  test::expect_error([&] { SessionStore({.swap = folder.path()}, no_format()); }, "swap", "which process");
  test::expect_error([&] { SessionStore({.swap = notes}, no_format()); }, "swap", "expected a folder");
}

}  // namespace
}  // namespace efla::engine
