// The engine's sessions: rewinding, saving, loading.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "efla/base/check.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/serve/local_engine.h"

namespace efla::serve {
namespace {

constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 53;  // of a text in a file

}  // namespace

// Returns a text without its last tokens: the state before its last request, advanced again by the ids that stay.
std::shared_ptr<StoredText> LocalEngine::rewound(const StoredText& text, std::int64_t tokens) {
  const auto& before = *text.before;
  const std::size_t kept = text.since->size() - static_cast<std::size_t>(tokens),
                    pending = before.record.pending.size();
  if (kept == pending) return std::make_shared<StoredText>(before);
  auto result = std::make_shared<StoredText>(text);
  std::vector<std::int32_t> since(text.since->size());
  text.since->copy_to(since);
  since.resize(kept);
  result->prefilled = std::min(text.prefilled, kept - 1);
  result->decoded = std::min(text.decoded, kept - 1 - result->prefilled);

  nn::StatePool scratch(1, model_.state_floats());
  const auto slot = scratch.slot(0);
  std::fill(slot.begin(), slot.end(), 0.0F);
  if (before.state) before.state->copy_to(slot);
  std::vector<float> hidden;
  const std::int64_t first = before.state_tokens();
  for (std::size_t at = 0; at + 1 < kept;) {
    const std::size_t reply_end = result->prefilled + result->decoded;
    const bool decode = at >= result->prefilled && at < reply_end;
    const std::size_t end = at < result->prefilled ? result->prefilled : kept - 1;
    const std::int64_t begin = first + static_cast<std::int64_t>(at);
    // Pieces end at cuts of the text, as when the ids were computed first.
    const std::int64_t room = options_.step_tokens - begin % nn::kCutTokens;
    const std::int64_t count = decode ? 1 : std::min<std::int64_t>(room, static_cast<std::int64_t>(end - at));
    const nn::TextRun run{0, begin, count, decode};
    hidden.resize(static_cast<std::size_t>(count * model_.config().hidden_size));
    const std::lock_guard lock(model_mutex_);
    model_.advance(std::span(since).subspan(at, static_cast<std::size_t>(count)), {&run, 1}, scratch,
                   View<float, 2>::contiguous(hidden.data(), {count, model_.config().hidden_size}), pool_);
    at += static_cast<std::size_t>(count);
  }
  result->state = std::make_shared<StoredState>(std::vector<float>(slot.begin(), slot.end()));

  auto& record = result->record;
  record = extended(before.record, std::span(since).subspan(pending), *tokenizer_);
  record.counters[0] = text.record.counters[0];
  record.counters[1] = text.record.counters[1] - std::min(text.record.counters[1], static_cast<std::uint64_t>(tokens));
  record.counters[2] = static_cast<std::uint64_t>(first) + kept - 1;
  record.pending = {since.back()};
  record.held.clear();
  result->since = std::make_shared<StoredIds>(std::move(since));
  return result;
}

void LocalEngine::rewind(const std::string& name, std::int64_t tokens) {
  store_.reserve(name, tokens > 0 ? info_.session_bytes : 0);  // the state before, which forks may share, stays
  std::shared_ptr<StoredText> shorter;
  try {
    const auto text = store_.get(name);
    Require("engine")(tokens >= 0 && tokens <= text->rewindable(), "tokens", tokens,
                      "0 to " + std::to_string(text->rewindable()) + ", the tokens since the last request began");
    if (tokens > 0) shorter = rewound(*text, tokens);
  } catch (...) {
    store_.release(name, nullptr, false);
    throw;
  }
  store_.release(name, std::move(shorter), false);
}

std::string LocalEngine::save(const std::string& name) const {
  const auto text = store_.peek(name);
  std::vector<float> state(model_.state_floats());
  if (text->state) text->state->copy_to(state);
  std::vector<io::NamedTensor> tensors;
  const std::vector<nn::StatePart> parts = model_.state_parts();
  for (const auto& part : parts) {
    tensors.push_back(
        {part.name,
         io::TensorType::F32,
         part.shape,
         {reinterpret_cast<const std::uint8_t*>(state.data() + part.offset), part.floats * sizeof(float)}});
  }
  text->record.append_to(tensors);
  return io::safetensors_bytes(tensors, text->record.metadata(info_.model_sha256));
}

void LocalEngine::load(const std::string& name, std::string_view bytes) {
  const std::string path = "session " + name;
  const auto content = io::parse_safetensors(io::as_bytes(bytes), path);
  auto text = std::make_shared<StoredText>();
  try {
    text->record =
        generate::read_session_record(content.tensors, content.metadata, path, info_.model_sha256, info_.vocab_size);
  } catch (const Error& error) {
    throw Error("engine", "session", error.got(), error.expected());
  }
  const auto refuse = [&](const std::string& what) { throw IoError(IoError::Kind::content, path, -1, what); };
  if (text->record.counters[2] > kMostTokens) refuse("not a session: a text of too many tokens");
  for (const auto id : text->record.last_ids) {
    if (id >= drawable_) refuse("not a session: token " + std::to_string(id));
  }
  for (const auto id : text->record.pending) {
    if (id >= drawable_) refuse("not a session: token " + std::to_string(id));
  }
  std::vector<float> state(model_.state_floats());
  for (const auto& part : model_.state_parts()) {
    const auto found = std::find_if(content.tensors.begin(), content.tensors.end(),
                                    [&](const io::NamedTensor& tensor) { return tensor.name == part.name; });
    if (found == content.tensors.end() || found->type != io::TensorType::F32 || found->shape != part.shape) {
      refuse("not a session: " + part.name + " is missing or of another type or shape");
    }
    std::memcpy(state.data() + part.offset, found->bytes.data(), found->bytes.size());
  }
  if (!std::all_of(state.begin(), state.end(), [](float x) { return std::isfinite(x); })) {
    refuse("not a session: a state with numbers that are not finite");
  }
  text->state = std::make_shared<StoredState>(std::move(state));
  store_.put(name, std::move(text));
}

}  // namespace efla::serve
