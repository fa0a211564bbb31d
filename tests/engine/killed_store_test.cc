// Sessions in files when the process is killed at any time, with texts that share pages: without LibTorch, so that the
// sanitizers see it too.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "efla/engine/session_files.h"
#include "efla/engine/session_store.h"
#include "tests/support/killed_work.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

constexpr std::int64_t kVocabSize = 8, kPageTokens = 64;
constexpr std::size_t kPageBytes = 1 << 16;  // so that a save takes a while

std::unique_ptr<SessionStore> make_store(const StoreOptions& options) {
  const auto layout = [](std::int64_t tokens) {
    return StateLayout{.parts = {{"constant", {1}, 0, 1}}, .pages = tokens / kPageTokens, .page_bytes = kPageBytes};
  };
  auto store =
      std::make_unique<SessionStore>(options, SessionFormat({"model", "float32", kVocabSize, kVocabSize}, layout));
  store->load_files();
  return store;
}

std::unique_ptr<SessionStore> store_in(const std::filesystem::path& folder) { return make_store({.sessions = folder}); }

float first_number(const nn::Page& page) {
  float number = 0.0F;
  std::memcpy(&number, page->data(), sizeof(number));
  return number;
}

void expect_numbers(const nn::TextState& state) {
  for (std::size_t i = 0; i < state.pages.size(); ++i) {
    EXPECT_EQ(first_number(state.pages[i]), static_cast<float>(i));
  }
}

// Returns the state of a session; of an empty text if there is none.
nn::TextState state_of(const SessionStore& store, const std::string& name) {
  if (!store.contains(name)) return {0, std::make_shared<std::vector<float>>(1)};
  return store.peek(name)->state->get();
}

// Stores a session with one page more, which has its own number. Calls `then` as the store does.
void grow(SessionStore& store, const std::string& name, std::function<void(const std::string&)> then) {
  auto state = state_of(store, name);
  const auto number = static_cast<float>(state.pages.size());
  auto page = std::make_shared<nn::PageBytes>(kPageBytes);
  std::memcpy(page->data(), &number, sizeof(number));
  state.pages.push_back(std::move(page));
  state.tokens += kPageTokens;
  const auto text = std::make_shared<StoredText>();
  text->state = store.stored(state);
  text->record.counters[2] = static_cast<std::uint64_t>(state.tokens);
  text->record.seen.resize(kVocabSize / 8);
  store.store(store.reserve(name, kPageBytes), text, false, std::move(then));
}

TEST(KilledStore, KeepsEveryPageThatItConfirmed) {
  const test::TempFolder folder;
  const auto sessions = folder / "sessions";
  std::size_t confirmed = 0;  // pages
  for (const int ms : {2, 5, 9, 14, 20}) {
    confirmed +=
        static_cast<std::size_t>(test::confirmed_until_killed(std::chrono::milliseconds(ms), [&](const auto& confirm) {
          const auto store = store_in(sessions);
          for (;;) {
            std::promise<std::string> error;
            grow(*store, "book", [&](const std::string& what) { error.set_value(what); });
            if (!error.get_future().get().empty()) return;
            confirm();
          }
        }));

    const auto store = store_in(sessions);
    const auto state = state_of(*store, "book");
    ASSERT_GE(state.pages.size(), confirmed);
    ASSERT_LE(state.pages.size(), confirmed + 1);
    expect_numbers(state);
    EXPECT_TRUE(store->files()->all_set_aside().empty());
    confirmed = state.pages.size();
  }
}

TEST(EndingStore, ALastTextIsInAFile) {
  const test::TempFolder folder;
  bool ended = false;
  grow(*store_in(folder / "sessions"), "book", [&](const std::string& error) { ended = error.empty(); });
  EXPECT_TRUE(ended);
  EXPECT_EQ(state_of(*store_in(folder / "sessions"), "book").pages.size(), 1U);
}

// Each thread grows its own text from the same first pages, and reads the others', while most pages are in files.
TEST(SharedPages, MoveToFilesWhileOtherThreadsReadThem) {
  constexpr int kThreads = 3, kTurns = 20;
  constexpr std::size_t kMemory = 6 * kPageBytes;
  const test::TempFolder swap;
  const auto store = make_store({.memory = kMemory, .swap = swap.path()});
  for (int i = 0; i < 4; ++i) grow(*store, "base", [](const std::string&) {});
  for (int i = 0; i < kThreads; ++i) store->fork("base", "t" + std::to_string(i));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&store, i] {
      for (int turn = 0; turn < kTurns; ++turn) {
        grow(*store, "t" + std::to_string(i), [](const std::string&) {});
        expect_numbers(state_of(*store, "t" + std::to_string((i + turn) % kThreads)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i) {
    const auto state = state_of(*store, "t" + std::to_string(i));
    EXPECT_EQ(state.pages.size(), 4U + kTurns);
    expect_numbers(state);
  }
  EXPECT_LE(store->bytes().memory, kMemory);
  EXPECT_EQ(store->bytes().moving, 0U);
  EXPECT_EQ(store->bytes().memory / kPageBytes + store->bytes().files / kPageBytes, 4U + kThreads * kTurns);
}

}  // namespace
}  // namespace efla::engine
