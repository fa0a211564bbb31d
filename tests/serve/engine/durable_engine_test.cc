// Sessions that are files too: when they are written and removed, and what a new start finds.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>

#include "efla/serve/durable_engine.h"
#include "tests/serve/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

class DurableSessions : public testing::Test {
 protected:
  std::unique_ptr<DurableEngine> start(const EngineOptions& options = {}) const {
    return std::make_unique<DurableEngine>(tiny_engine(options), folder / "sessions");
  }
  std::filesystem::path file_of(const std::string& name) const { return folder / "sessions" / (name + ".safetensors"); }
  bool has_file(const std::string& name) const { return std::filesystem::exists(file_of(name)); }

  const test::TempFolder folder;
};

TEST_F(DurableSessions, AreInFilesAfterEveryChange) {
  auto engine = start();
  reply(*engine, in_session(request_of("Once upon", 5), "", "text"));
  engine->fork("text", "copy");
  reply(*engine, in_session(request_of(" a time", 9), "text", "text"));
  rewind(*engine, "text", 4);
  engine->load("loaded", engine->save("copy"));
  reply(*engine, in_session(request_of("x", 1), "", "erased"));
  EXPECT_TRUE(has_file("erased"));
  engine->erase("erased");
  EXPECT_FALSE(has_file("erased"));
  reply(*engine, in_session(request_of("x", 1), "", "_7"));
  EXPECT_FALSE(has_file("_7"));
  for (const std::string name : {"text", "copy", "loaded"}) {
    EXPECT_EQ(test::read_text(file_of(name)), engine->save(name)) << name;
  }
  const auto next = in_session(request_of("", 20), "text", "");
  const Record before = reply(*engine, next);
  engine.reset();
  engine = start();
  EXPECT_EQ(engine->sessions().size(), 3U);
  EXPECT_EQ(reply(*engine, next), before);
  engine->erase("loaded");
  EXPECT_FALSE(has_file("loaded"));
}

TEST_F(DurableSessions, ForksShareTheirMemoryAfterARestart) {
  const auto slot = tiny_engine()->info().session_bytes;
  const EngineOptions options{.session_memory = 2 * slot + 4000};
  auto engine = start(options);
  reply(*engine, in_session(request_of("Once upon", 5), "", "base"));
  for (int i = 0; i < 5; ++i) engine->fork("base", "fork" + std::to_string(i));
  reply(*engine, in_session(request_of(" a time", 5), "base", "fork3"));
  const auto before = engine->save("fork3"), base = engine->save("base");
  engine.reset();
  engine = start(options);
  EXPECT_EQ(engine->sessions().size(), 6U);
  EXPECT_EQ(engine->save("fork3"), before);
  EXPECT_EQ(engine->save("fork4"), base);
  engine.reset();
  test::expect_error([&] { start({.session_memory = slot + 1000}); }, "session_memory", "or in swap a folder");
}

// Calls a function at the end of a reply.
class AtTheEnd final : public Listener {
 public:
  AtTheEnd(std::shared_ptr<Listener> listener, std::function<void()> call)
      : listener_(std::move(listener)), call_(std::move(call)) {}
  void token(const Token& token) override { listener_->token(token); }
  void finish(const Finish& finish) override {
    call_();
    listener_->finish(finish);
  }

 private:
  std::shared_ptr<Listener> listener_;
  std::function<void()> call_;
};

TEST_F(DurableSessions, AreInFilesBeforeTheReplyEnds) {
  const auto engine = start();
  const auto recorder = std::make_shared<Recorder>();
  bool kept = false;
  engine->submit(in_session(request_of("Once upon", 5), "", "text"),
                 std::make_shared<AtTheEnd>(recorder, [&] { kept = has_file("text"); }));
  EXPECT_EQ(recorder->record().reason, FinishReason::length);
  EXPECT_TRUE(kept);
}

TEST_F(DurableSessions, LoseTheirFilesWhenTheyAreDropped) {
  const auto engine = start({.max_disposable = 2});
  for (const std::string name : {"a", "b", "c"}) {
    auto request = in_session(request_of("x", 1), "", name);
    request.disposable = true;
    reply(*engine, request);
  }
  EXPECT_FALSE(has_file("a"));
  EXPECT_TRUE(has_file("b"));
  EXPECT_TRUE(has_file("c"));
}

TEST_F(DurableSessions, AreStillDisposableAfterARestart) {
  const auto slot = tiny_engine()->info().session_bytes;
  auto engine = start();
  for (const std::string name : {"a", "b", "c", "d", "N", "O"}) {
    auto request = in_session(request_of(name, 1), "", name);
    request.disposable = name >= "a";
    reply(*engine, request);
  }
  const auto saved = engine->save("a");
  const auto restart = [&](const EngineOptions& options) {
    engine.reset();
    engine = start(options);
    std::string named, disposable;
    for (const auto& session : engine->sessions()) {
      (session.disposable ? disposable : named) += session.name;
      EXPECT_TRUE(has_file(session.name));
    }
    EXPECT_EQ(named, "NO");
    return disposable;
  };
  EXPECT_EQ(restart({}), "abcd");
  EXPECT_EQ(engine->save("a"), saved);
  auto written = std::filesystem::file_time_type::clock::now();
  for (const std::string name : {"a", "b", "c", "d"}) {  // from the newest to the oldest
    std::filesystem::last_write_time(file_of(name), written -= std::chrono::hours(1));
  }
  EXPECT_EQ(restart({.max_disposable = 3}), "abc");
  EXPECT_EQ(restart({.session_memory = 4 * slot + 4000}), "ab");
  EXPECT_EQ(restart({.session_memory = 2 * slot + 2000}), "");
  for (const std::string name : {"a", "b", "c", "d"}) EXPECT_FALSE(has_file(name));
}

TEST_F(DurableSessions, AFileThatCannotBeWrittenIsSaid) {
  const auto engine = start();
  std::filesystem::create_directories(file_of("text") / "occupied");
  const Record record = reply(*engine, in_session(request_of("Once upon", 5), "", "text"));
  EXPECT_EQ(record.reason, FinishReason::error);
  EXPECT_NE(record.error.find("text is stored, but not in a file"), std::string::npos) << record.error;
  EXPECT_EQ(record.ids.size(), 5U);
  try {
    rewind(*engine, "text", 1);
    FAIL() << "the file was written";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("text is stored, but not in a file"), std::string::npos) << error.what();
  }
  engine->fork("text", "copy");
  EXPECT_TRUE(has_file("copy"));
}

TEST_F(DurableSessions, AFileThatCouldNotBeWrittenIsWrittenLater) {
  const auto engine = start();
  const auto fails = [&](const std::string& name) {
    std::filesystem::create_directories(file_of(name) / "occupied");
    EXPECT_EQ(reply(*engine, in_session(request_of(name, 5), "", name)).reason, FinishReason::error);
  };
  fails("a");
  fails("b");
  fails("erased");
  engine->erase("erased");
  std::filesystem::remove_all(file_of("a"));
  reply(*engine, in_session(request_of("x", 1), "", "next"));
  EXPECT_EQ(test::read_text(file_of("a")), engine->save("a"));
  EXPECT_THROW(engine->keep_unwritten(), std::runtime_error);
  std::filesystem::remove_all(file_of("b"));
  EXPECT_NO_THROW(engine->keep_unwritten());
  EXPECT_EQ(test::read_text(file_of("b")), engine->save("b"));
  EXPECT_TRUE(std::filesystem::is_directory(file_of("erased")));
}

TEST_F(DurableSessions, AFileThatCannotBeRemovedFailsNoOtherRequest) {
  const auto engine = start({.max_disposable = 1});
  const auto store = [&](const std::string& name) {
    auto request = in_session(request_of("x", 1), "", name);
    request.disposable = true;
    return reply(*engine, request).reason;
  };
  store("a");
  std::filesystem::remove(file_of("a"));
  std::filesystem::create_directories(file_of("a") / "occupied");
  EXPECT_EQ(store("b"), FinishReason::length);  // drops a
  EXPECT_TRUE(has_file("a"));
  reply(*engine, in_session(request_of("x", 1), "", "_7"));
  EXPECT_NO_THROW(engine->erase("_7"));
  std::filesystem::remove(file_of("a") / "occupied");
  EXPECT_EQ(store("c"), FinishReason::length);
  EXPECT_FALSE(has_file("a"));
  std::filesystem::remove(file_of("c"));
  std::filesystem::create_directories(file_of("c") / "occupied");
  EXPECT_THROW(engine->erase("c"), std::runtime_error);
}

TEST_F(DurableSessions, LeaveOtherFilesAlone) {
  reply(*start(), in_session(request_of("x", 1), "", "text"));
  std::filesystem::create_symlink("nothing", file_of("link"));
  std::filesystem::create_directory(file_of("folder"));
  for (const std::string name : {".hid", "_1", "-x", "a copy"}) {
    std::filesystem::copy_file(file_of("text"), file_of(name));
  }
  const auto files = [&] {
    std::set<std::filesystem::path> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "sessions")) names.insert(entry.path());
    return names;
  };
  const auto before = files();
  {
    const auto engine = start();
    const auto sessions = engine->sessions();
    ASSERT_EQ(sessions.size(), 1U);
    EXPECT_EQ(sessions.front().name, "text");
  }
  EXPECT_EQ(files(), before);
}

TEST_F(DurableSessions, RefusesASecondEngineAndFilesOfOthers) {
  {
    const auto engine = start();
    reply(*engine, in_session(request_of("x", 1), "", "text"));
    test::expect_error([&] { start(); }, "sessions", "");
  }
  test::expect_error([&] { DurableEngine(tiny_engine({}, /*seed=*/2), folder / "sessions"); }, "sessions",
                     "a session of this model");
  test::write_text(folder / "sessions/broken.safetensors", "rubbish");
  EXPECT_THROW(start(), IoError);
}

}  // namespace
}  // namespace efla::serve
