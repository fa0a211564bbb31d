// Sessions in files when the process is killed at any time, with an engine that follows a script: without LibTorch, so
// that the sanitizers see it too.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "efla/engine/durable_engine.h"
#include "efla/io/safetensors/safetensors.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

constexpr std::size_t kPrompt = 300'000;  // bytes of the first text, so that a save takes a while

// An engine whose sessions are saved as files of safetensors.
class SavingEngine final : public FakeEngine {
 public:
  using FakeEngine::FakeEngine;
  std::string save(const std::string& name) const override {
    const std::string text = text_of(name);
    const io::NamedTensor tensor{
        "text", io::TensorType::U8, {static_cast<std::int64_t>(text.size())}, io::as_bytes(text)};
    return io::safetensors_bytes({&tensor, 1});
  }
  void load(const std::string& name, std::string_view bytes) override {
    const auto content = io::parse_safetensors(io::as_bytes(bytes), name);
    const auto text = content.tensors.at(0).bytes;
    FakeEngine::load(name, "state:" + std::string(text.begin(), text.end()));
  }
};

class Waiting final : public engine::Listener {
 public:
  void token(const engine::Token&) override {}
  void finish(const engine::Finish&) override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_; });
  }
  bool ended() {
    const std::lock_guard lock(mutex_);
    return ended_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
};

// An engine that finishes its one request while it ends.
class EndingEngine final : public FakeEngine {
 public:
  ~EndingEngine() override {
    load(save_as_, "state:text");
    listener_->finish({.reason = engine::FinishReason::length});
  }
  engine::RequestId submit(engine::Request request, std::vector<std::shared_ptr<engine::Listener>> listeners) override {
    save_as_ = request.save_as;
    listener_ = std::move(listeners.front());
    return 1;
  }

 private:
  std::string save_as_;
  std::shared_ptr<engine::Listener> listener_;
};

// Advances the session "book" by a token, and stores it.
void advance(engine::Engine& engine) {
  engine::Request request;
  const auto sessions = engine.sessions();
  if (sessions.empty()) {
    request.prompt.assign(kPrompt, 'p');
  } else {
    request.session = "book";
  }
  request.save_as = "book";
  request.max_tokens = 1;
  const auto listener = std::make_shared<Waiting>();
  engine.submit(std::move(request), listener);
  listener->wait();
}

TEST(KilledEngine, KeepsEveryTokenThatItConfirmed) {
  const test::TempFolder folder;
  const auto sessions = folder / "sessions";
  std::size_t confirmed = 0;  // tokens of replies
  for (const int ms : {2, 5, 9, 14, 20}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(ends[0]);
      engine::DurableEngine engine(std::make_unique<SavingEngine>("a"), sessions);
      for (;;) {
        advance(engine);
        if (write(ends[1], "+", 1) != 1) _exit(1);
      }
    }
    close(ends[1]);
    char one = 0;
    ASSERT_EQ(read(ends[0], &one, 1), 1);  // it has begun
    ++confirmed;
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    while (read(ends[0], &one, 1) == 1) ++confirmed;
    close(ends[0]);

    auto inner = std::make_unique<SavingEngine>("a");
    const FakeEngine& engine = *inner;
    const engine::DurableEngine next(std::move(inner), sessions);
    const std::string text = engine.text_of("book");
    ASSERT_GE(text.size(), kPrompt + confirmed);
    ASSERT_LE(text.size(), kPrompt + confirmed + 1);
    EXPECT_EQ(text, std::string(kPrompt, 'p') + std::string(text.size() - kPrompt, 'a'));
    confirmed = text.size() - kPrompt;
  }
}

TEST(EndingEngine, ALastReplyIsInAFile) {
  const test::TempFolder folder;
  const auto listener = std::make_shared<Waiting>();
  {
    engine::DurableEngine engine(std::make_unique<EndingEngine>(), folder.path());
    engine::Request request;
    request.save_as = "book";
    engine.submit(std::move(request), listener);
  }
  EXPECT_TRUE(listener->ended());
  EXPECT_EQ(test::read_text(folder / "book.safetensors"), "state:text");
}

}  // namespace
}  // namespace efla::serve
