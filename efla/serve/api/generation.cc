#include "efla/serve/api/generation.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <random>
#include <utility>
#include <variant>

#include "efla/serve/api/generation_run.h"
#include "efla/serve/api/message_format.h"
#include "efla/serve/api/response_format.h"
#include "efla/serve/api/tool_grammar.h"
#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

// Returns whether the engine has a session of this name that is the state of a response.
bool is_response(const engine::Engine& engine, const std::string& name) {
  try {
    return engine.session(name).disposable;
  } catch (const engine::NoSuchSession&) {
    return false;
  }
}

// Returns whether the beginning of a reply has opened its reasoning.
bool opens_reasoning(const ChatText& text) {
  const std::string_view end = text.back();
  return end.substr(0, end.find_last_not_of(kBlanks) + 1).ends_with("<think>");
}

// Throws TemplateError for what a chat template does not show the model.
void require_variables(const Chat& chat, const ChatTemplate& chat_template) {
  const auto source = chat_template.source(!chat.tools.empty());
  const auto refuse = [](const std::string& field) {
    throw TemplateError(
        400,
        field + ": got some, expected none, because the chat template of this server does not show them to the model",
        field);
  };
  if (!chat.tools.empty() && source.find("tools") == std::string_view::npos) refuse("tools");
  if (!chat.documents.empty() && source.find("documents") == std::string_view::npos) refuse("documents");
  if (!chat.variables.empty() && source.empty()) refuse("chat_template_kwargs");
}

// Returns the name of the field that a prompt comes from.
const char* prompt_field(Shape shape) {
  if (shape == Shape::completion) return "prompt";
  return shape == Shape::response ? "input" : "messages";
}

const char* id_prefix(Shape shape) {
  switch (shape) {
    case Shape::completion:
      return "cmpl-";
    case Shape::chat:
      return "chatcmpl-";
    case Shape::response:
      return "resp_";
    case Shape::message:
      return "msg_";
  }
  return "";
}

// Renders the chat of a request. pending: of the text that the chat continues. Throws ApiError.
RenderedChat render_chat(const ApiContext& context, GenerationRequest& request, const Pending& pending) {
  const auto& chat_template = *context.options.chat;
  auto& chat = request.chat;
  // The variables of a message say how much it may reason, and a template without variables has no reasoning.
  if (request.shape == Shape::message && chat_template.source(false).empty()) chat.variables.clear();
  try {
    require_variables(chat, chat_template);
    return !pending ? chat_template.render(chat) : RenderedChat{.text = chat_template.continuation(chat)};
  } catch (const TemplateError& error) {
    const bool about_chat = error.status == 400 && error.field.empty();
    throw ApiError(error.status, error.message, about_chat ? prompt_field(request.shape) : error.field);
  }
}

// Returns the ids of a chat's text.
std::vector<std::int32_t> chat_ids(const ApiContext& context, const GenerationRequest& request, const ChatText& text,
                                   const Pending& pending, HttpExchange& exchange) {
  const bool bos = !context.options.chat->writes_bos() && request.bos.value_or(context.options.bos);
  return encode_chat(context, text, bos, pending, prompt_field(request.shape), exchange);
}

}  // namespace

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
    if (request_.grammar) return compile_grammar();
    if (request_.max_reasoning_tokens && reply_format_.reasoning) constrain(nullptr);
    submit_all();
    begin_stream();
  } catch (...) {
    fail(current_error(client_));
  }
  release();
}

void Generation::compile_grammar() {
  request_.grammar->after_blanks = reply_format_.reasoning;
  context_.grammars->compile(*request_.grammar, [self = shared_from_this()](GrammarCompiler::Result result) {
    self->context_.work(HttpServer::Lane::quick, [self, result] { self->submit_constrained(result); });
  });
}

void Generation::submit_constrained(const GrammarCompiler::Result& compiled) {
  try {
    const auto& field = request_.grammar_field;
    if (!compiled.grammar) throw ApiError(compiled.is_busy ? 503 : 400, field + ": " + compiled.error, field);
    constrain(compiled.grammar);
    submit_all();
    begin_stream();
  } catch (...) {
    fail(current_error(client_));
  }
  release();
}

// Makes the replies follow a grammar, if there is one, behind reasoning of a limited length.
void Generation::constrain(std::shared_ptr<const Grammar> grammar) {
  const auto& field = request_.grammar_field;
  ReplyRule rule{
      .max_reasoning_tokens = request_.max_reasoning_tokens, .grammar = std::move(grammar), .ends = end_ids()};
  if (rule.grammar && rule.ends.empty()) {
    throw ApiError(400, field + ": got a form of the reply, expected none, because no token of this model ends a text",
                   field);
  }
  if (reply_format_.reasoning) {
    rule.reasoning = reply_format_.in_reasoning ? ReplyRule::Reasoning::begun : ReplyRule::Reasoning::maybe;
  }
  constraint_ = make_constraint(reasoning_tokens(context_), std::move(rule));
}

// Returns the ids that end a reply.
std::vector<std::int32_t> Generation::end_ids() const {
  std::vector<std::int32_t> ids = context_.info.ends;
  ids.insert(ids.end(), request_.stop_token_ids.begin(), request_.stop_token_ids.end());
  for (const auto& [id, text] : tokenizer().special_texts()) {
    if (std::ranges::find(request_.stop, text) != request_.stop.end()) ids.push_back(id);
  }
  std::erase_if(ids, [&](auto id) { return id < 0 || id >= tokenizer().vocab_size(); });
  return ids;
}

void Generation::prepare() {
  check_model(context_, request_.model);
  const auto& options = context_.options;
  if (!request_.max_tokens) request_.max_tokens = options.max_tokens;
  // Clients of Anthropic's API always name a number, usually a large one.
  if (request_.shape == Shape::message) request_.max_tokens = std::min(*request_.max_tokens, options.max_tokens);
  if (*request_.max_tokens > options.max_tokens) {
    const std::string field = request_.max_tokens_field;
    throw ApiError(400,
                   field + ": got " + std::to_string(*request_.max_tokens) + ", expected at most " +
                       std::to_string(options.max_tokens),
                   field);
  }
  if (!request_.seeded) request_.sampling.seed = std::random_device{}();
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  head_ = {random_name(id_prefix(request_.shape)), options.model,
           std::chrono::duration_cast<std::chrono::seconds>(now).count(), request_.shape};
  if (request_.shape == Shape::response) items_ = std::make_unique<ResponseFormat>(head_, request_);
  if (request_.shape == Shape::message) items_ = std::make_unique<MessageFormat>(head_, request_);
  prepare_states();
  prepare_prompts();
  exchange_->hold(static_cast<std::ptrdiff_t>(most_reply_bytes()));
  choices_.resize(replies());
  if (request_.shape != Shape::completion) prepare_parsers();
}

// Returns the bytes that the longest replies take, as texts, as scores and as JSON.
std::size_t Generation::most_reply_bytes() const {
  constexpr double kTokenBytes = 16, kScoreBytes = 256;  // per token, and per id with a log-probability
  constexpr double kMost = 1e18;                         // more than any limit
  auto tokens = static_cast<double>(replies()) * static_cast<double>(*request_.max_tokens);
  if (request_.logprobs >= 0 && request_.echo) {
    for (const auto& prompt : prompts_) tokens += static_cast<double>(request_.n) * static_cast<double>(prompt.size());
  }
  const double bytes =
      tokens * (request_.logprobs < 0 ? kTokenBytes : kScoreBytes * static_cast<double>(1 + request_.logprobs));
  return static_cast<std::size_t>(std::min(bytes, kMost));
}

// Finds or loads the state that the request continues, and names the state that the request leaves.
void Generation::prepare_states() {
  auto& engine = context_.engine;
  if (!request_.session.empty()) from_ = engine_name(client_, request_.session);
  if (const auto& previous = request_.previous_response; !previous.empty()) {
    from_ = engine_name(client_, previous);
    if (!is_response(engine, from_)) {
      const std::string field = "previous_response_id";
      throw ApiError(404, field + ": got \"" + previous + "\", expected a stored one", field, "not_found");
    }
  }
  if (!from_.empty()) pending_ = engine.session(from_).pending;  // NoSuchSession is answered as in /v1/sessions
  if (request_.state) {
    state_ = read_state(context_, *request_.state);
    pending_ = state_.pending;
    request_.state->clear();
  }
  if (!request_.save_as.empty()) save_as_ = engine_name(client_, request_.save_as);
  if (request_.store) save_as_ = engine_name(client_, head_.id);
}

// Renders a chat and makes it the prompt.
void Generation::prepare_chat() {
  const auto& chat_template = *context_.options.chat;
  const auto rendered = render_chat(context_, request_, pending_);
  const auto encode = [&](const ChatText& text) { return chat_ids(context_, request_, text, pending_, *exchange_); };
  prompts_.push_back(encode(rendered.text));
  for (const auto& beginning : rendered.beginnings) {
    if (beginning != ChatText{""}) cache_after_.push_back(std::ssize(encode(beginning)));
  }
  const auto source = chat_template.source(!request_.chat.tools.empty());
  reply_format_.reasoning = source.find("</think>") != std::string_view::npos;
  reply_format_.in_reasoning = reply_format_.reasoning && opens_reasoning(rendered.text);
  if (!request_.tools.empty()) {
    reply_format_.calls = context_.options.tool_format.value_or(tool_format_of(source));
    prepare_calls(source);
  }
  const auto stop = chat_template.stop();
  request_.stop.insert(request_.stop.end(), stop.begin(), stop.end());
  const auto end = chat_template.end_turn();
  for (const auto& [id, text] : tokenizer().special_texts()) {
    if (stop.empty() && end && end->starts_with(text)) request_.stop_token_ids.push_back(id);
  }
}

// Makes the replies have calls as tool_choice and strict tools say. source: of the chat template.
void Generation::prepare_calls(std::string_view source) {
  if (!request_.strict_calls && !request_.grammar) return;
  const ToolChoice choice{request_.must_call, request_.called, request_.one_call};
  const auto has = [&](std::string_view text) { return source.find(text) != std::string_view::npos; };
  const char* arguments = !has("\"arguments\"") && has("\"parameters\"") ? "parameters" : "arguments";
  try {
    request_.grammar = tool_grammar(request_.tools, reply_format_.calls, choice, request_.grammar, arguments);
  } catch (const Error& error) {
    throw ApiError(400, "tools: got " + error.got() + ", expected " + error.expected(), "tools");
  }
  if (request_.must_call) request_.grammar_field = "tool_choice";
  if (request_.grammar_field.empty()) request_.grammar_field = "tools";
}

void Generation::prepare_parsers() {
  reply_format_.one_call = request_.one_call;
  reply_format_.tools = request_.tools;
  for (auto& choice : choices_) {
    auto format = reply_format_;
    format.id = random_name(request_.shape == Shape::message ? "toolu_" : "call_");
    choice.parser.emplace(std::move(format));
  }
}

void Generation::prepare_prompts() {
  const bool bos = request_.bos.value_or(context_.options.bos);
  const char* field = prompt_field(request_.shape);
  const auto encode = [&](const Prompt& prompt) {
    return encode_prompt(context_, prompt, bos, pending_, field, *exchange_);
  };
  if (request_.shape == Shape::completion) {
    cache_after_ = {request_.cache_tokens};
  } else {
    prepare_chat();
  }
  for (auto& prompt : request_.prompts) {
    prompts_.push_back(encode(prompt));
    if (request_.echo) {
      const std::size_t added = std::holds_alternative<std::string>(prompt) ? bos_ids(context_, bos, pending_) : 0;
      echoes_.push_back(echo_of(tokenizer(), std::move(prompt), prompts_.back(), added, request_.logprobs >= 0));
    }
  }
  prompt_tokens_ = std::ssize(prompts_.front());
  request_.prompts.clear();  // frees memory, because a request may wait for long
  request_.chat = {};
  if (const auto most = context_.info.max_queue; std::cmp_greater(replies(), most)) {
    throw ApiError(400,
                   "n: got " + std::to_string(replies()) + " replies in all, expected at most the " +
                       std::to_string(most) + " that may wait",
                   "n");
  }
}

// Submits a request per prompt, each for all of its replies.
void Generation::submit_all() {
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    engine::Request made;
    made.prompt = std::exchange(prompts_[i], {});
    made.session = from_;
    made.state = state_;
    made.save_as = save_as_;
    made.return_state = request_.return_state;
    made.disposable = request_.disposable;
    made.cache_after = cache_after_;
    made.places = i == 0 ? static_cast<std::int64_t>(replies()) : 0;  // the first request has the places of all
    made.max_tokens = *request_.max_tokens;
    made.sampling = request_.sampling;
    made.constraint = constraint_;
    made.stop = request_.stop;
    made.stop_token_ids = request_.stop_token_ids;
    if (request_.shape != Shape::completion) made.end_turn = context_.options.chat->end_turn();
    made.logprobs = request_.logprobs;
    made.echo = request_.echo && request_.logprobs >= 0;
    made.client = client_;
    if (context_.options.deadline.count() > 0) made.deadline = engine::Clock::now() + context_.options.deadline;
    submit(std::move(made), i);
  }
}

// Submits the request of a prompt. Does not hold the mutex while the engine takes the request, because the engine may
// write files.
void Generation::submit(engine::Request request, std::size_t prompt) {
  const auto n = static_cast<std::size_t>(request_.n);
  std::vector<std::shared_ptr<engine::Listener>> receivers;
  for (std::size_t i = 0; i < n; ++i) {
    receivers.push_back(std::make_shared<Receiver>(shared_from_this(), prompt * n + i));
  }
  left_ += n;
  engine::RequestId id = 0;
  try {
    id = context_.engine.submit(std::move(request), std::move(receivers));
  } catch (...) {
    left_ -= n;  // not to 0, because the thread that submits counts too
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

void start_generation(ApiContext& context, GenerationRequest request, const std::string& client,
                      const std::shared_ptr<HttpExchange>& exchange) {
  std::make_shared<Generation>(context, std::move(request), client, exchange)->start();
}

std::int64_t count_prompt(const ApiContext& context, GenerationRequest request, HttpExchange& exchange) {
  check_model(context, request.model);
  const auto rendered = render_chat(context, request, {});
  return std::ssize(chat_ids(context, request, rendered.text, {}, exchange));
}

}  // namespace efla::serve
