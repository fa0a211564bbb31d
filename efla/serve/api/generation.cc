#include "efla/serve/api/generation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <utility>

#include "efla/serve/api/base64.h"
#include "efla/serve/api/echo.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/formats.h"

namespace efla::serve {
namespace {

// Returns whether the engine has a session of this name that is the state of a response.
bool is_response(const Engine& engine, const std::string& name) {
  try {
    return engine.session(name).disposable;
  } catch (const NoSuchSession&) {
    return false;
  }
}

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(ApiContext& context, GenerationRequest request, std::string client, std::shared_ptr<HttpExchange> exchange)
      : context_(context),
        client_(std::move(client)),
        place_(take_place(context, client_)),
        request_(std::move(request)),
        exchange_(std::move(exchange)) {}
  ~Generation() { drop_temporary(); }  // of a request that had no memory for its end

  void start();

 private:
  // Receives one reply, or the scores of a prompt.
  class Receiver : public Listener {
   public:
    Receiver(std::shared_ptr<Generation> generation, std::size_t index)
        : generation_(std::move(generation)), index_(index) {}
    void prompt(std::span<const PromptToken> tokens) override { generation_->prompt(index_, tokens); }
    void token(const Token& token) override { generation_->token(index_, token); }
    void finish(const Finish& finish) override { generation_->finish(index_, finish); }

   private:
    std::shared_ptr<Generation> generation_;
    std::size_t index_;
  };

  void prepare();
  void prepare_states();
  void prepare_prompts();
  void submit_all();
  void submit(Request request, std::size_t index);
  void submit_forks(std::size_t prompt);
  void release();
  Request engine_request(std::size_t replica) const;
  void begin_stream();

  // On the engine's thread:
  void prompt(std::size_t index, std::span<const PromptToken> tokens);
  void token(std::size_t index, const Token& token);
  void finish(std::size_t index, const Finish& finish);
  void begin_reply(std::size_t index);
  void send_text(std::size_t index, std::string_view text, std::size_t first_scored);

  // On the thread for work:
  void complete();
  void answer();
  void fail(const ApiError& error);
  void drop_temporary();
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
  std::unique_ptr<ResponseFormat> response_;
  std::vector<std::vector<std::int32_t>> prompts_;
  std::vector<Echo> echoes_;                              // of every prompt, with echo
  std::vector<std::int64_t> cache_after_;                 // of every prompt
  std::vector<std::vector<ScoredToken>> scored_prompts_;  // of prompts with several replies
  std::string from_, save_as_;                            // engine's names
  std::vector<std::string> forks_;                        // of prompts with several replies
  std::vector<std::string> temporary_;
  std::vector<Choice> choices_;
  Usage usage_;
  std::atomic<std::size_t> left_ = 1;  // requests that are not finished, plus the thread that submits
  std::mutex mutex_;                   // guards the members that follow
  std::vector<RequestId> ids_;
  bool gone_ = false, failed_ = false, begun_ = false;
};

void Generation::start() {
  try {
    prepare();
    exchange_->on_gone([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      const std::lock_guard lock(self->mutex_);
      self->gone_ = true;
      for (const auto id : self->ids_) self->context_.engine.cancel(id);
    });
    submit_all();
    begin_stream();
  } catch (...) {
    fail(current_error(client_));
  }
  release();
}

void Generation::prepare() {
  check_model(context_, request_.model);
  const auto& options = context_.options;
  if (!request_.max_tokens) request_.max_tokens = options.max_tokens;
  if (*request_.max_tokens > options.max_tokens) {
    const std::string field = request_.max_tokens_field;
    throw ApiError(400,
                   field + ": got " + std::to_string(*request_.max_tokens) + ", expected at most " +
                       std::to_string(options.max_tokens),
                   field);
  }
  if (!request_.seeded) request_.sampling.seed = std::random_device{}();
  const char* prefix = request_.shape == Shape::chat       ? "chatcmpl-"
                       : request_.shape == Shape::response ? "resp_"
                                                           : "cmpl-";
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  head_ = {random_name(prefix), options.model, std::chrono::duration_cast<std::chrono::seconds>(now).count(),
           request_.shape};
  if (request_.shape == Shape::response) response_ = std::make_unique<ResponseFormat>(head_, request_);
  prepare_states();
  prepare_prompts();
  exchange_->hold(static_cast<std::ptrdiff_t>(most_reply_bytes()));
  choices_.resize(replies());
  scored_prompts_.resize(prompts_.size());
}

// Returns the bytes that the longest replies take, as texts, as scores and as JSON.
std::size_t Generation::most_reply_bytes() const {
  constexpr double kTokenBytes = 16, kScoreBytes = 256;  // per token, and per id with a log-probability
  auto tokens = static_cast<double>(replies()) * static_cast<double>(*request_.max_tokens);
  if (request_.logprobs < 0) return static_cast<std::size_t>(kTokenBytes * tokens);
  for (const auto& prompt : prompts_) {
    if (request_.echo) tokens += static_cast<double>(request_.n) * static_cast<double>(prompt.size());
  }
  return static_cast<std::size_t>(kScoreBytes * static_cast<double>(1 + request_.logprobs) * tokens);
}

// Finds or loads the state that the request continues, and names the state that the request leaves.
void Generation::prepare_states() {
  auto& engine = context_.engine;
  const auto temporary = [&] {
    temporary_.push_back("_" + std::to_string(context_.next_name++));
    return temporary_.back();
  };
  if (!request_.session.empty()) {
    from_ = engine_name(client_, request_.session);
    engine.session(from_);  // throws NoSuchSession, which is answered as in /v1/sessions
  }
  if (const auto& previous = request_.previous_response; !previous.empty()) {
    from_ = engine_name(client_, previous);
    if (!is_response(engine, from_)) {
      const std::string field = "previous_response_id";
      throw ApiError(404, field + ": got \"" + previous + "\", expected a stored one", field, "not_found");
    }
  }
  if (request_.state) {
    from_ = temporary();
    load_state(context_, from_, *request_.state);
    request_.state->clear();
  }
  if (!request_.save_as.empty()) save_as_ = engine_name(client_, request_.save_as);
  if (request_.store) save_as_ = engine_name(client_, head_.id);
  if (request_.return_state) save_as_ = temporary();
}

void Generation::prepare_prompts() {
  const bool bos = request_.bos.value_or(context_.options.bos);
  const char* field = request_.shape == Shape::completion ? "prompt"
                      : request_.shape == Shape::chat     ? "messages"
                                                          : "input";
  const auto encode = [&](const Prompt& prompt) {
    return encode_prompt(context_, prompt, bos, from_, field, *exchange_);
  };
  if (request_.shape == Shape::completion) {
    cache_after_ = {request_.cache_tokens};
  } else {
    const auto& chat = context_.options.chat;
    request_.prompts = {chat.render(request_.chat)};
    request_.stop.insert(request_.stop.end(), chat.stop.begin(), chat.stop.end());
    for (std::size_t i = 0; from_.empty() && i < request_.chat.size(); ++i) {  // the cache has beginnings only
      if (!request_.chat[i].cached) continue;
      const auto beginning = chat.render_messages(std::span(request_.chat).first(i + 1));
      if (!beginning.empty()) cache_after_.push_back(static_cast<std::int64_t>(encode(beginning).size()));
    }
  }
  for (auto& prompt : request_.prompts) {
    prompts_.push_back(encode(prompt));
    if (request_.echo) {
      const std::size_t added = std::holds_alternative<std::string>(prompt) ? bos_ids(context_, bos, from_) : 0;
      echoes_.push_back(echo_of(tokenizer(), std::move(prompt), prompts_.back(), added, request_.logprobs >= 0));
    }
  }
  request_.prompts.clear();  // frees memory, because a request may wait for long
  request_.chat.clear();
  if (const auto most = context_.info.max_queue; std::cmp_greater(replies(), most)) {
    throw ApiError(400,
                   "n: got " + std::to_string(replies()) + " replies in all, expected at most the " +
                       std::to_string(most) + " that may wait",
                   "n");
  }
}

// Returns a request without a prompt.
Request Generation::engine_request(std::size_t replica) const {
  Request made;
  made.session = from_;
  made.places = 0;  // the first request has the places of all
  made.max_tokens = *request_.max_tokens;
  made.sampling = request_.sampling;
  made.sampling.seed += replica;
  made.stop = request_.stop;
  made.stop_token_ids = request_.stop_token_ids;
  made.logprobs = request_.logprobs;
  made.client = client_;
  if (context_.options.deadline.count() > 0) made.deadline = Clock::now() + context_.options.deadline;
  return made;
}

// Submits the requests. Several replies to a prompt begin with forks of the state after the prompt, which is prefilled
// once.
void Generation::submit_all() {
  forks_.resize(prompts_.size());  // now, because another thread reads the first ones while this one adds more
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    auto request = engine_request(0);
    request.echo = request_.echo && request_.logprobs >= 0;
    request.prompt = std::exchange(prompts_[i], {});
    request.cache_after = cache_after_;
    if (i == 0) request.places = static_cast<std::int64_t>(replies());
    if (request_.n == 1) {
      request.save_as = save_as_;
      request.disposable = request_.disposable;
      if (request_.shape != Shape::completion) request.end_turn = context_.options.chat.after_reply();
      submit(std::move(request), i);
      continue;
    }
    temporary_.push_back("_" + std::to_string(context_.next_name++));
    request.save_as = forks_[i] = temporary_.back();
    request.max_tokens = 0;
    submit(std::move(request), replies() + i);
  }
}

// Submits a request. Does not hold the mutex while the engine takes the request, because the engine may write files.
void Generation::submit(Request request, std::size_t index) {
  ++left_;
  RequestId id = 0;
  try {
    id = context_.engine.submit(std::move(request), std::make_shared<Receiver>(shared_from_this(), index));
  } catch (...) {
    --left_;  // not to 0, because the thread that submits counts too
    throw;
  }
  const std::lock_guard lock(mutex_);
  ids_.push_back(id);
  if (gone_ || failed_) context_.engine.cancel(id);  // finish() still comes and cleans up
}

// Completes the reply after the last request.
void Generation::release() {
  if (--left_ > 0) return;
  constexpr std::size_t kQuickReply = 1 << 20;  // bytes; a longer reply keeps no other one waiting
  const auto lane = most_reply_bytes() > kQuickReply ? HttpServer::Lane::slow : HttpServer::Lane::quick;
  context_.work(lane, [self = shared_from_this()] { self->complete(); });
}

void Generation::submit_forks(std::size_t prompt) {
  try {
    const auto n = static_cast<std::size_t>(request_.n);
    for (std::size_t replica = 0; replica < n; ++replica) {
      auto request = engine_request(replica);
      request.session = forks_[prompt];
      submit(std::move(request), prompt * n + replica);
    }
  } catch (...) {
    fail(current_error(client_));
  }
  release();
}

// Begins the stream, once: when the engine has taken the requests, so that a full queue still gets its status, or at
// the first token.
void Generation::begin_stream() {
  if (!request_.stream) return;
  const std::lock_guard lock(mutex_);
  if (failed_ || std::exchange(begun_, true)) return;
  exchange_->begin_events();
  if (response_) return exchange_->write(response_->first_events());
  std::string events;
  for (std::size_t i = 0; i < replies(); ++i) events += first_event(head_, i);
  exchange_->write(events);
}

void Generation::prompt(std::size_t index, std::span<const PromptToken> tokens) {
  const bool has_forks = index >= replies();
  auto& scored = has_forks ? scored_prompts_[index - replies()] : choices_[index].scored;
  const auto& echo = echoes_[has_forks ? index - replies() : prompt_of(index)];
  for (const auto& token : tokens) {
    const auto offset = echo.offsets.at(scored.size());
    scored.push_back({token.token.id, token.token.logprob, token.alternatives, offset});
  }
}

// Begins a reply with the echo of its prompt. Does nothing for a reply that has begun.
void Generation::begin_reply(std::size_t index) {
  auto& choice = choices_[index];
  if (std::exchange(choice.begun, true) || !request_.echo) return;
  const auto& echo = echoes_[prompt_of(index)];
  choice.characters = CharacterCount(echo.characters);
  choice.text = echo.text;
  if (request_.stream) send_text(index, echo.text, 0);
}

void Generation::token(std::size_t index, const Token& token) {
  begin_reply(index);
  auto& choice = choices_[index];
  const auto scored = choice.scored.size();
  if (request_.logprobs >= 0) {
    const auto offset = choice.characters.push(token.bytes, tokenizer());
    choice.scored.push_back({token.drawn.id, token.drawn.logprob, token.alternatives, offset});
  }
  choice.text += token.text;
  if (request_.stream && (!token.text.empty() || request_.logprobs >= 0)) send_text(index, token.text, scored);
}

void Generation::send_text(std::size_t index, std::string_view text, std::size_t first_scored) {
  begin_stream();
  if (response_) return exchange_->write(response_->text_event(text));
  auto& choice = choices_[index];
  if (choice.scored.empty()) return exchange_->write(chunk_event(head_, index, text, "null"));
  const std::vector<ScoredToken> fresh(choice.scored.begin() + static_cast<std::ptrdiff_t>(first_scored),
                                       choice.scored.end());
  const auto logprobs = logprobs_json(request_.shape, fresh, tokenizer());
  exchange_->write(chunk_event(head_, index, text, logprobs.text()));
}

void Generation::finish(std::size_t index, const Finish& finish) {
  usage_.prompt_tokens += finish.usage.prompt_tokens;
  usage_.cached_tokens += finish.usage.cached_tokens;
  usage_.completion_tokens += finish.usage.completion_tokens;
  if (index >= replies()) {  // a prompt with several replies
    const auto prompt = index - replies();
    const auto n = static_cast<std::size_t>(request_.n);
    if (finish.reason == FinishReason::length || finish.reason == FinishReason::stop) {
      for (std::size_t i = 0; i < n; ++i) choices_[prompt * n + i].scored = scored_prompts_[prompt];
      return context_.work(HttpServer::Lane::quick,
                           [self = shared_from_this(), prompt] { self->submit_forks(prompt); });
    }
    for (std::size_t i = 0; i < n; ++i) choices_[prompt * n + i].finish = finish;
    return release();
  }
  begin_reply(index);
  auto& choice = choices_[index];
  choice.text += finish.text;
  choice.finish = finish;
  if (request_.stream) begin_stream();
  if (request_.stream && !response_) {
    std::string events;
    if (!finish.text.empty()) events += chunk_event(head_, index, finish.text, "null");
    exchange_->write(events + last_event(head_, index, finish));
  } else if (request_.stream && !finish.text.empty()) {
    exchange_->write(response_->text_event(finish.text));
  }
  release();
}

void Generation::complete() {
  if (failed()) return drop_temporary();
  try {
    for (const auto& choice : choices_) require_success(*choice.finish);
    if (choices_.front().finish->reason == FinishReason::deadline) save_as_.clear();  // the engine stores nothing
    answer();
  } catch (...) {
    fail(current_error(client_));
    drop_temporary();
  }
}

void Generation::answer() {
  JsonText extra = JsonText::object();
  if (request_.return_state && !save_as_.empty()) {
    extra.add("state", to_base64(context_.options.state_keys.sign(context_.engine.save(save_as_))));
  }
  drop_temporary();
  if (request_.stream) {
    if (response_) {
      exchange_->write(response_->last_events(choices_.front(), usage_));
    } else {
      if (request_.include_usage) extra.add("usage", usage_json(usage_));
      // One write, because a state is large, and a write closes a connection that has too many unsent bytes.
      exchange_->write((extra.is_empty() ? std::string() : extra_event(head_, extra)) + std::string(kDone));
    }
    return exchange_->end();
  }
  for (std::size_t i = 0; i < replies(); ++i) begin_reply(i);  // replies without a token have an echo too
  auto body =
      response_ ? response_->object(&choices_.front(), usage_) : reply_json(head_, choices_, usage_, tokenizer());
  body.add_all(extra);
  exchange_->reply({.body = std::move(body).text()});
}

void Generation::fail(const ApiError& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(failed_, true)) return;
  for (const auto id : ids_) context_.engine.cancel(id);
  if (!begun_) return exchange_->reply(to_reply(error));
  exchange_->write(response_ ? response_->error_event(error.message) : event(to_json(error)));
  exchange_->end();
}

void Generation::drop_temporary() {
  for (const auto& name : std::exchange(temporary_, {})) {
    try {
      context_.engine.erase(name);
    } catch (...) {  // it was never stored, or no longer is
    }
  }
}

}  // namespace

void start_generation(ApiContext& context, GenerationRequest request, const std::string& client,
                      const std::shared_ptr<HttpExchange>& exchange) {
  std::make_shared<Generation>(context, std::move(request), client, exchange)->start();
}

}  // namespace efla::serve
