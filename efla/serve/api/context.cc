#include "efla/serve/api/context.h"

#include <algorithm>
#include <random>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/serve/api/error.h"

namespace efla::serve {

HttpReply json_reply(JsonText value) { return {.body = std::move(value).text()}; }

std::string engine_name(const std::string& client, const std::string& session) {
  return client.empty() ? session : client + "." + session;
}

std::shared_ptr<void> take_place(ApiContext& context, const std::string& client) {
  const std::lock_guard lock(context.mutex);
  const auto most = context.options.max_requests_per_key;
  auto& running = context.running[client];
  if (most > 0 && running >= most) {
    throw ApiError(429, "this key has " + std::to_string(running) + " requests running already", "",
                   "too_many_requests");
  }
  ++running;
  return {nullptr, [&context, client](void*) {
            const std::lock_guard lock(context.mutex);
            if (--context.running[client] == 0) context.running.erase(client);
          }};
}

std::shared_ptr<const ReasoningTokens> reasoning_tokens(ApiContext& context) {
  const std::lock_guard lock(context.mutex);
  if (!context.reasoning_tokens) {
    context.reasoning_tokens = std::make_shared<const ReasoningTokens>(*context.info.tokenizer);
  }
  return context.reasoning_tokens;
}

std::string random_name(const std::string& prefix) {
  constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz";
  std::random_device device;
  std::string name = prefix;
  for (int i = 0; i < 24; ++i)
    name += kLetters[std::uniform_int_distribution<std::size_t>(0, kLetters.size() - 1)(device)];
  return name;
}

void require_ids(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids, const std::string& field) {
  const auto size = tokenizer.vocab_size();
  for (const auto id : ids) {
    if (id < size) continue;
    throw ApiError(400, field + ": got token " + std::to_string(id) + ", expected 0 to " + std::to_string(size - 1),
                   field);
  }
}

std::size_t bos_ids(const ApiContext& context, bool bos, const Pending& from) {
  return bos && !from && context.info.tokenizer->bos() >= 0 ? 1 : 0;
}

namespace {

// Counts the memory of ids.
void hold_ids(HttpExchange& exchange, std::size_t ids) {
  // Bytes per id: the id itself, and its part of the names of the prompt's beginnings for the prefix cache.
  constexpr std::size_t kIdBytes = 6;
  exchange.hold(static_cast<std::ptrdiff_t>(kIdBytes * ids));
}

// Throws ApiError about `field` for a text without ids, and for more ids than the server takes.
void require_length(const ApiContext& context, const std::vector<std::int32_t>& ids, const Pending& from,
                    const std::string& field) {
  if (ids.empty() && !from) throw ApiError(400, field + ": got an empty text, expected at least one token", field);
  const auto most = context.options.max_prompt_tokens;
  if (most == 0) return;
  // A state that a client sent may have many pending tokens, which the request prefills too.
  const auto unread = std::max<std::int64_t>(0, from.value_or(0) - 1);
  if (const auto tokens = static_cast<std::int64_t>(ids.size()) + unread; tokens > most) {
    throw ApiError(
        400, field + ": got " + std::to_string(tokens) + " tokens to read, expected at most " + std::to_string(most),
        field, "context_length_exceeded");
  }
}

}  // namespace

std::vector<std::int32_t> encode_prompt(const ApiContext& context, const Prompt& prompt, bool bos, const Pending& from,
                                        const std::string& field, HttpExchange& exchange) {
  if (const auto* text = std::get_if<std::string>(&prompt)) {
    return encode_chat(context, {text, 1}, bos, from, field, exchange);
  }
  hold_ids(exchange, std::get<std::vector<std::int32_t>>(prompt).size());
  auto ids = std::get<std::vector<std::int32_t>>(prompt);
  require_ids(*context.info.tokenizer, ids, field);  // because replies with logprobs name every token
  require_length(context, ids, from, field);
  return ids;
}

std::vector<std::int32_t> encode_chat(const ApiContext& context, std::span<const std::string> text, bool bos,
                                      const Pending& from, const std::string& field, HttpExchange& exchange) {
  const auto& tokenizer = *context.info.tokenizer;
  std::vector<std::int32_t> ids(bos_ids(context, bos, from), tokenizer.bos());
  const auto add = [&](const std::vector<std::int32_t>& encoded) {
    hold_ids(exchange, encoded.size());
    ids.insert(ids.end(), encoded.begin(), encoded.end());
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool begins = i == 0;
    if (i % 2 == 1) {
      add(tokenizer.encode_as_text(text[i], begins));
    } else if (begins || !text[i].empty()) {
      encode_in_pieces(tokenizer, text[i], add, begins);
    }
  }
  require_length(context, ids, from, field);
  return ids;
}

namespace {

// Calls f, which gives a state to the engine. engines: how the engine's messages call the state.
template <class F>
auto take_state(ApiContext& context, std::string_view state, const std::string& engines, const F& f) {
  const std::string field = "state";
  const auto refuse = [&](const std::string& reason) { return ApiError(400, field + ": " + reason, field); };
  context.options.state_keys.require_signature(state, field);
  try {
    return f();
  } catch (const IoError& error) {
    const std::string what = error.what();
    if (error.kind() != IoError::Kind::content || error.path() != engines) throw;
    throw refuse(what.substr(what.find(": ") + 2));
  } catch (const Error& error) {
    if (!error.got().starts_with(engines)) throw;
    throw refuse("got a state" + error.got().substr(engines.size()) + ", expected " + error.expected());
  }
}

}  // namespace

void load_state(ApiContext& context, const std::string& name, std::string_view state) {
  take_state(context, state, "session " + name, [&] { context.engine.load(name, state); });
}

engine::HeldText read_state(ApiContext& context, std::string_view state) {
  return take_state(context, state, "session", [&] { return context.engine.read(state); });
}

void require_success(const engine::Finish& finish) {
  if (finish.reason == engine::FinishReason::cancelled) throw ApiError(503, "the server is stopping");
  if (finish.reason != engine::FinishReason::error) return;
  if (finish.no_memory) throw ApiError(503, "not enough memory");
  throw ApiError(500, finish.error);
}

void check_model(const ApiContext& context, const std::string& model) {
  if (model.empty() || model == context.options.model) return;
  throw ApiError(404, "model: got \"" + printable(model, 100) + "\", expected \"" + context.options.model + "\"",
                 "model", "model_not_found");
}

}  // namespace efla::serve
