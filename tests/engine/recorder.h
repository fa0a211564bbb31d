// A listener that keeps a reply, and an engine over a small model with random weights.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "efla/engine/local_engine.h"
#include "tests/engine/tiny_model.h"

namespace efla::engine {

// What a listener got, with logprobs as bits, because NaN is not equal to itself.
struct Record {
  std::vector<std::int32_t> ids;
  std::string text;
  std::vector<std::uint32_t> scores;  // of the reply's tokens and of their alternatives
  std::vector<std::uint32_t> echo;    // of the prompt's
  std::vector<std::int32_t> others;   // ids of all alternatives
  FinishReason reason = FinishReason::error;
  std::string stop, error;

  bool operator==(const Record&) const = default;
};

class Recorder final : public Listener {
 public:
  explicit Recorder(std::function<void(std::size_t)> on_token = {}) : on_token_(std::move(on_token)) {}

  void prompt(std::span<const PromptToken> tokens) override {
    for (const auto& token : tokens) {
      add(token.token, record_.echo);
      for (const auto& other : token.alternatives) add(other, record_.echo);
    }
  }
  void token(const Token& token) override {
    record_.ids.push_back(token.drawn.id);
    record_.text += token.text;
    add(token.drawn, record_.scores);
    for (const auto& other : token.alternatives) {
      record_.others.push_back(other.id);
      add(other, record_.scores);
    }
    if (on_token_) on_token_(record_.ids.size());
  }
  void finish(const Finish& finish) override {
    const std::lock_guard lock(mutex_);
    record_.text += finish.text;
    record_.reason = finish.reason;
    record_.stop = finish.stop;
    record_.error = finish.error;
    finish_ = finish;
    changed_.notify_all();
  }

  bool ended() const {
    const std::lock_guard lock(mutex_);
    return finish_.has_value();
  }
  // Waits for the end.
  const Record& record() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finish_.has_value(); });
    return record_;
  }
  const Finish& end() {
    record();
    return *finish_;
  }

 private:
  static void add(const ScoredId& scored, std::vector<std::uint32_t>& bits) {
    bits.push_back(std::bit_cast<std::uint32_t>(scored.logprob));
  }

  std::function<void(std::size_t)> on_token_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Record record_;
  std::optional<Finish> finish_;
};

inline std::unique_ptr<LocalEngine> tiny_engine(const EngineOptions& options = {}, std::uint64_t seed = 1) {
  return std::make_unique<LocalEngine>(test::tiny_model(seed), data::load_tokenizer("bytes"), options);
}

// Returns an engine over GpuDecoder: on a GPU with options.on_gpu, otherwise with LibTorch's functions on the CPU.
inline std::unique_ptr<LocalEngine> gpu_engine(const EngineOptions& options) {
  const auto model = std::make_shared<nn::LanguageModel>(test::tiny_model());
  if (options.on_gpu) return start_engine(model, data::load_tokenizer("bytes"), options);
  return std::make_unique<LocalEngine>(make_gpu_model(model, nn::WeightType::float32, 258), fingerprint(*model),
                                       model->parameter_count(), data::load_tokenizer("bytes"), options);
}

// A tokenizer of bytes that calls a function, once, before it returns the bytes of '!'.
class CallingTokenizer final : public data::Tokenizer {
 public:
  explicit CallingTokenizer(std::function<void()> call)
      : Tokenizer(data::load_tokenizer("bytes")->info()), call_(std::move(call)) {}

  std::vector<std::int32_t> encode_part(std::string_view part, bool begins) const override {
    return bytes_->encode_part(part, begins);
  }
  std::string_view bytes_of(std::int32_t id) const override {
    if (id == '!' && call_) std::exchange(call_, {})();
    return bytes_->bytes_of(id);
  }
  bool begins_with_added_space(std::int32_t id) const override { return bytes_->begins_with_added_space(id); }
  std::size_t last_cut(std::string_view part) const override { return bytes_->last_cut(part); }

 private:
  std::unique_ptr<data::Tokenizer> bytes_ = data::load_tokenizer("bytes");
  mutable std::function<void()> call_;
};

inline Record reply(Engine& engine, Request request) {
  const auto recorder = std::make_shared<Recorder>();
  engine.submit(std::move(request), recorder);
  return recorder->record();
}

// Returns a request that rolls a session back.
inline Request rewind_of(const std::string& name, std::int64_t tokens) {
  Request request;
  request.session = request.save_as = name;
  request.rewind = tokens;
  return request;
}

// Returns the ids of replies that run side by side.
inline std::vector<std::vector<std::int32_t>> replies(Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (const auto& request : requests) {
    recorders.push_back(std::make_shared<Recorder>());
    engine.submit(request, recorders.back());
  }
  std::vector<std::vector<std::int32_t>> ids;
  for (const auto& recorder : recorders) {
    EXPECT_EQ(recorder->record().error, "");
    ids.push_back(recorder->record().ids);
  }
  return ids;
}

inline void rewind(Engine& engine, const std::string& name, std::int64_t tokens) {
  if (const auto record = reply(engine, rewind_of(name, tokens)); record.reason != FinishReason::length) {
    throw std::runtime_error(record.error);
  }
}

inline std::vector<std::int32_t> ids_of(std::string_view text) {
  std::vector<std::int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<std::uint8_t>(c));
  return ids;
}

// Returns a request whose reply never draws the id that ends a text.
inline Request request_of(std::string_view prompt, std::int64_t max_tokens, std::uint64_t seed = 7) {
  Request request;
  request.prompt = ids_of(prompt);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  request.sampling.logit_bias = {{256, -100.0}, {257, -100.0}};  // no end of the text
  return request;
}

// Returns a request for the most probable tokens, which a model that draws draws itself.
inline Request greedy(std::string_view prompt, std::int64_t max_tokens) {
  auto request = request_of(prompt, max_tokens);
  request.sampling.logit_bias.clear();
  request.sampling.temperature = 0.0;
  return request;
}

inline Request in_session(Request request, const std::string& from, const std::string& save_as) {
  request.session = from;
  request.save_as = save_as;
  return request;
}

}  // namespace efla::engine
