// Sessions that are files too: when they are written and removed, and what a new start finds.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

class DurableSessions : public testing::Test {
 protected:
  std::unique_ptr<LocalEngine> start(EngineOptions options = {}, std::uint64_t seed = 1) const {
    options.sessions = folder / "sessions";
    return tiny_engine(options, seed);
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
  auto held = request_of("x", 1);
  held.return_state = true;
  reply(*engine, held);
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
  EXPECT_THROW(engine->erase("erased"), std::runtime_error);  // what lies at its place is in the way
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
  reply(*engine, in_session(request_of("x", 1), "", "-7"));  // gets no file
  EXPECT_NO_THROW(engine->erase("-7"));
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

TEST_F(DurableSessions, RefusesASecondEngineAndAFolderOfAnotherModel) {
  {
    const auto engine = start();
    reply(*engine, in_session(request_of("x", 1), "", "text"));
    test::expect_error([&] { start(); }, "sessions", "");
  }
  test::expect_error([&] { start({}, /*seed=*/2); }, "sessions", "a session of this model");
  EXPECT_TRUE(has_file("text"));
}

TEST_F(DurableSessions, FilesThatCannotBeLoadedAreSetAside) {
  auto engine = start();
  for (const std::string name : {"good", "truncated", "flipped"}) {
    reply(*engine, in_session(request_of(name, 3), "", name));
  }
  const auto good = engine->save("good");
  engine.reset();
  {
    const test::TempFolder others;
    const auto other = tiny_engine({.sessions = others / "sessions"}, /*seed=*/2);
    reply(*other, in_session(request_of("x", 1), "", "foreign"));
    std::filesystem::copy_file(others / "sessions/foreign.safetensors", file_of("foreign"));
  }
  test::write_text(file_of("rubbish"), "rubbish");
  test::write_text(folder / "sessions/rubbish.safetensors.set-aside", "of an earlier start");
  std::filesystem::resize_file(file_of("truncated"), 1000);
  auto bytes = test::read_text(file_of("flipped"));
  constexpr float kInfinite = INFINITY;
  std::memcpy(bytes.data() + 8 + static_cast<unsigned char>(bytes[0]) + 256 * static_cast<unsigned char>(bytes[1]),
              &kInfinite, sizeof(kInfinite));  // the state's first number
  test::write_text(file_of("flipped"), bytes);
  engine = start();
  EXPECT_EQ(engine->sessions().size(), 1U);
  EXPECT_EQ(engine->save("good"), good);
  EXPECT_EQ(engine->statistics().set_aside, 4U);
  ASSERT_EQ(engine->set_aside().size(), 4U);
  EXPECT_NE(engine->set_aside().back().find("foreign.safetensors cannot be loaded"), std::string::npos);
  for (const std::string name : {"truncated", "flipped", "foreign", "rubbish"}) {
    EXPECT_FALSE(has_file(name));
    EXPECT_TRUE(std::filesystem::exists(file_of(name) += name == "rubbish" ? ".set-aside2" : ".set-aside")) << name;
  }
  reply(*engine, in_session(request_of("x", 1), "", "truncated"));  // the name is free
  engine.reset();
  EXPECT_EQ(start()->statistics().set_aside, 0U);
}

TEST_F(DurableSessions, EverySeedOutlivesARestart) {
  auto engine = start();
  const std::uint64_t seeds[] = {0, INT64_MAX, std::uint64_t{1} << 63, UINT64_MAX - 1, UINT64_MAX};
  std::map<std::string, std::string> saved;
  for (const auto seed : seeds) {
    const auto name = "s" + std::to_string(seed);
    reply(*engine, in_session(request_of("x", 3, seed), "", name));
    saved[name] = engine->save(name);
  }
  engine.reset();
  engine = start();
  for (const auto& [name, bytes] : saved) EXPECT_EQ(engine->save(name), bytes) << name;
  EXPECT_EQ(engine->statistics().set_aside, 0U);
}

TEST_F(DurableSessions, AStateThatIsNotFiniteIsNotStored) {
  const auto model = test::tiny_model();
  {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model.named_parameters()) {
      if (parameter.key().ends_with("v_proj.weight")) torch::Tensor(parameter.value()).fill_(3e38F);
    }
  }
  LocalEngine engine(model, data::load_tokenizer("bytes"), {.sessions = folder / "sessions"});
  const Record record = reply(engine, in_session(request_of("xy", 0), "", "text"));
  EXPECT_EQ(record.reason, FinishReason::error);
  EXPECT_NE(record.error.find("numbers that are not finite"), std::string::npos) << record.error;
  EXPECT_TRUE(engine.sessions().empty());
  EXPECT_FALSE(has_file("text"));
}

}  // namespace
}  // namespace efla::engine
