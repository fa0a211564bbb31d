// One request for text on its way through the service. A header of generation*.cc alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/serve/api/context.h"
#include "efla/serve/api/echo.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/formats.h"
#include "efla/serve/api/item_format.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/http/http.h"

namespace efla::serve {

// A request for text, from its start to the end of its reply. It lives as long as the engine or a thread for work has a
// part of it to do.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(ApiContext& context, GenerationRequest request, std::string client, std::shared_ptr<HttpExchange> exchange)
      : context_(context),
        client_(std::move(client)),
        place_(take_place(context, client_)),
        request_(std::move(request)),
        exchange_(std::move(exchange)) {}

  void start();

 private:
  // Receives one reply, or the scores of a prompt.
  class Receiver : public engine::Listener {
   public:
    Receiver(std::shared_ptr<Generation> generation, std::size_t index)
        : generation_(std::move(generation)), index_(index) {}
    void prompt(std::span<const engine::PromptToken> tokens) override { generation_->prompt(index_, tokens); }
    void token(const engine::Token& token) override { generation_->token(index_, token); }
    void finish(const engine::Finish& finish) override { generation_->finish(index_, finish); }

   private:
    std::shared_ptr<Generation> generation_;
    std::size_t index_;
  };

  void prepare();
  void prepare_states();
  void prepare_prompts();
  void prepare_chat();
  void prepare_parsers();
  std::vector<std::int32_t> end_ids() const;
  void prepare_calls(std::string_view source);
  void constrain(std::shared_ptr<const Grammar> grammar);
  // Submits the requests once their grammar is compiled.
  void compile_grammar();
  void submit_constrained(const GrammarCompiler::Result& compiled);
  void submit_all();
  void submit(engine::Request request, std::size_t prompt);
  void release();
  void begin_stream();

  // On the engine's thread:
  void prompt(std::size_t index, std::span<const engine::PromptToken> tokens);
  void token(std::size_t index, const engine::Token& token);
  void finish(std::size_t index, const engine::Finish& finish);
  void begin_reply(std::size_t index);
  // Sends a piece of a reply. fresh: the tokens with logprobs since the last piece.
  void send_text(std::size_t index, std::string_view text, std::span<const ScoredToken> fresh);
  void send_deltas(std::size_t index, std::span<const ReplyDelta> deltas, std::span<const ScoredToken> fresh);
  std::string logprobs_text(std::span<const ScoredToken> fresh) const;

  // On the thread for work:
  void complete();
  void answer();
  void fail(const ApiError& error);
  bool failed() {
    const std::lock_guard lock(mutex_);
    return failed_;
  }
  const data::Tokenizer& tokenizer() const { return *context_.info.tokenizer; }
  std::size_t prompt_of(std::size_t reply) const { return reply / static_cast<std::size_t>(request_.n); }
  std::size_t most_reply_bytes() const;
  std::size_t replies() const { return prompts_.size() * static_cast<std::size_t>(request_.n); }

  ApiContext& context_;
  std::string client_;
  std::shared_ptr<void> place_;  // destroyed late, because the context may end then
  GenerationRequest request_;
  std::shared_ptr<HttpExchange> exchange_;
  ReplyHead head_;
  std::unique_ptr<ItemFormat> items_;  // of a response and a message
  std::vector<std::vector<std::int32_t>> prompts_;
  std::int64_t prompt_tokens_ = 0;         // of the first prompt
  std::vector<Echo> echoes_;               // of every prompt, with echo
  std::vector<std::int64_t> cache_after_;  // of every prompt
  std::string from_, save_as_;             // engine's names
  ReplyFormat reply_format_;               // of a chat
  std::shared_ptr<const engine::Constraint> constraint_;
  engine::HeldText state_;  // that the client sent
  Pending pending_;         // of the text that the prompts continue
  std::vector<Choice> choices_;
  engine::Usage usage_;
  std::atomic<std::size_t> left_ = 1;  // replies that are not finished, plus the thread that submits
  std::mutex mutex_;                   // guards the members that follow
  std::vector<engine::RequestId> ids_;
  bool gone_ = false, failed_ = false, begun_ = false;
};

}  // namespace efla::serve
