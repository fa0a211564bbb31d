// The replies of an engine, for a command that prints them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "efla/engine/engine.h"

namespace efla::cli {

// Keeps a reply that the engine's thread makes until another thread takes it.
class ReplyReceiver final : public engine::Listener {
 public:
  void token(const engine::Token& token) override {
    const std::lock_guard lock(mutex_);
    add(token.text);
  }
  void finish(const engine::Finish& finish) override {
    const std::lock_guard lock(mutex_);
    finish_.emplace().reason = engine::FinishReason::error;  // and not another reason without memory for the rest
    finish_->error = "no memory";
    changed_.notify_all();
    add(finish.text);
    *finish_ = finish;
  }

  // Waits for the next text, at most this long. Returns the text since the last call.
  std::string wait(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [&] { return !fresh_.empty() || finish_; });
    return std::exchange(fresh_, {});
  }
  // Returns the end of the reply, or null as long as it goes on or text has not been taken.
  const engine::Finish* end() {
    const std::lock_guard lock(mutex_);
    return finish_ && fresh_.empty() ? &*finish_ : nullptr;
  }

  // Waits for the end. Returns the whole text. Throws std::runtime_error for a reply that failed.
  std::string whole() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finish_.has_value(); });
    if (finish_->reason == engine::FinishReason::error) throw std::runtime_error(finish_->error);
    return text_;
  }
  // Returns the whole text, after the end.
  const std::string& text() const { return text_; }

 private:
  void add(const std::string& text) {
    fresh_ += text;
    text_ += text;
    if (!text.empty()) changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string text_, fresh_;  // all text, and the text that has not been taken
  std::optional<engine::Finish> finish_;
};

}  // namespace efla::cli
