// The replies of a request for text: the engine's tokens become a stream or one whole reply.
#include <algorithm>
#include <mutex>
#include <utility>

#include "efla/serve/api/base64.h"
#include "efla/serve/api/generation_run.h"

namespace efla::serve {

// Begins the stream, once: when the engine has taken the requests, so that a full queue still gets its status, or at
// the first token.
void Generation::begin_stream() {
  if (!request_.stream) return;
  const std::lock_guard lock(mutex_);
  if (failed_ || std::exchange(begun_, true)) return;
  exchange_->begin_events();
  if (items_) return exchange_->write(items_->first_events(prompt_tokens_));
  std::string events;
  for (std::size_t i = 0; i < replies(); ++i) events += first_event(head_, i);
  exchange_->write(events);
}

void Generation::prompt(std::size_t index, std::span<const engine::PromptToken> tokens) {
  auto& scored = choices_[index].scored;
  const auto& echo = echoes_[prompt_of(index)];
  for (const auto& token : tokens) {
    const auto offset = echo.offsets.at(scored.size());
    scored.push_back({token.token.id, token.token.logprob, token.alternatives, offset});
  }
  // All replies to the prompt have the same scores, and none of them has begun.
  for (std::size_t i = 1; i < static_cast<std::size_t>(request_.n); ++i) choices_[index + i].scored = scored;
}

// Begins a reply with the echo of its prompt. Does nothing for a reply that has begun.
void Generation::begin_reply(std::size_t index) {
  auto& choice = choices_[index];
  if (std::exchange(choice.begun, true) || !request_.echo) return;
  const auto& echo = echoes_[prompt_of(index)];
  choice.characters = CharacterCount(echo.characters);
  choice.text = echo.text;
  if (request_.stream) send_text(index, echo.text, choice.scored);
}

void Generation::token(std::size_t index, const engine::Token& token) {
  begin_reply(index);
  auto& choice = choices_[index];
  const auto scored = choice.scored.size();
  if (request_.logprobs >= 0) {
    const auto offset = choice.characters.push(token.bytes, tokenizer());
    choice.scored.push_back({token.drawn.id, token.drawn.logprob, token.alternatives, offset});
  }
  const auto fresh = std::span<const ScoredToken>(choice.scored).subspan(scored);
  if (choice.parser) {
    if (choice.parser->in_reasoning()) ++choice.reasoning_tokens;
    return send_deltas(index, choice.parser->push(token.text), fresh);
  }
  choice.text += token.text;
  if (request_.stream && (!token.text.empty() || request_.logprobs >= 0)) send_text(index, token.text, fresh);
}

std::string Generation::logprobs_text(std::span<const ScoredToken> fresh) const {
  return logprobs_json(request_.shape, fresh, tokenizer()).text();
}

void Generation::send_text(std::size_t index, std::string_view text, std::span<const ScoredToken> fresh) {
  begin_stream();
  exchange_->write(chunk_event(head_, index, text, logprobs_text(fresh)));
}

// Sends pieces of the reply to a chat. A token without a piece, but with logprobs, has an empty one.
void Generation::send_deltas(std::size_t index, std::span<const ReplyDelta> deltas,
                             std::span<const ScoredToken> fresh) {
  const auto& calls = choices_[index].parser->calls();
  if (items_) {
    if (request_.stream && !deltas.empty()) begin_stream();
    const auto events = items_->push(deltas, calls);
    if (request_.stream && !events.empty()) exchange_->write(events);
    return;
  }
  if (!request_.stream || (deltas.empty() && fresh.empty())) return;
  begin_stream();
  if (deltas.empty()) return exchange_->write(chunk_event(head_, index, "", logprobs_text(fresh)));
  std::string events;
  for (const auto& delta : deltas) {
    events += delta_event(head_, index, delta, calls, &delta == deltas.data() ? logprobs_text(fresh) : "null");
  }
  exchange_->write(events);
}

void Generation::finish(std::size_t index, const engine::Finish& finish) {
  usage_.prompt_tokens += finish.usage.prompt_tokens;
  usage_.cached_tokens += finish.usage.cached_tokens;
  usage_.completion_tokens += finish.usage.completion_tokens;
  begin_reply(index);
  auto& choice = choices_[index];
  choice.finish = finish;
  if (choice.parser) {
    send_deltas(index, choice.parser->push(finish.text), {});
    send_deltas(index, choice.parser->finish(finish.reason != engine::FinishReason::stop), {});
  } else {
    choice.text += finish.text;
    if (request_.stream && !finish.text.empty()) send_text(index, finish.text, {});
  }
  if (request_.stream) begin_stream();
  if (request_.stream && !items_) exchange_->write(last_event(head_, index, choice));
  release();
}

void Generation::complete() {
  if (failed()) return;
  try {
    for (const auto& choice : choices_) require_success(*choice.finish);
    answer();
  } catch (...) {
    fail(current_error(client_));
  }
}

void Generation::answer() {
  JsonText extra = JsonText::object();
  auto& state = choices_.front().finish->state;  // none at a deadline
  if (state.text) extra.add("state", to_base64(context_.options.state_keys.sign(context_.engine.save(state))));
  state = state_ = {};
  if (request_.stream) {
    if (items_) {
      exchange_->write(items_->finish(choices_.front(), usage_));
    } else {
      if (request_.include_usage) extra.add("usage", usage_json(usage_, choices_));
      // One write, because a state is large, and a write closes a connection that has too many unsent bytes.
      exchange_->write((extra.is_empty() ? std::string() : extra_event(head_, extra)) + std::string(kDone));
    }
    return exchange_->end();
  }
  for (std::size_t i = 0; i < replies(); ++i) begin_reply(i);  // replies without a token have an echo too
  if (items_) items_->finish(choices_.front(), usage_);
  auto body = items_ ? items_->object() : reply_json(head_, choices_, usage_, tokenizer());
  body.add_all(extra);
  exchange_->reply({.body = std::move(body).text()});
}

void Generation::fail(const ApiError& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(failed_, true)) return;
  for (const auto id : ids_) context_.engine.cancel(id);
  const auto shape = request_.shape == Shape::message ? ErrorShape::anthropic : ErrorShape::openai;
  if (!begun_) return exchange_->reply(to_reply(error, shape));
  exchange_->write(items_ ? items_->error_event(error) : event(to_json(error)));
  exchange_->end();
}

}  // namespace efla::serve
