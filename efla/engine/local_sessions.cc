// The engine's sessions.
#include <torch/types.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "efla/base/check.h"
#include "efla/engine/local_engine.h"
#include "efla/engine/session_files.h"
#include "efla/io/sha256.h"
#include "efla/nn/models/language_model_json.h"

namespace efla::engine {

// Turns a rewind into a request. The request starts before the text's last request and computes the remaining ids
// again. Returns how these ids were first computed.
Replay LocalEngine::prepare_rewind(Request& request, const StoredText* text) {
  const Require require("request");
  require(request.prompt.empty(), "prompt", std::to_string(request.prompt.size()) + " tokens", "none with rewind");
  const std::int64_t most = text == nullptr ? 0 : text->rewindable();
  require(request.rewind <= most, "tokens", request.rewind,
          "0 to " + std::to_string(most) + ", the tokens since the last request began");
  request.prompt = *text->since->get();
  request.prompt.resize(request.prompt.size() - static_cast<std::size_t>(request.rewind));
  request.prompt.erase(request.prompt.begin(), request.prompt.begin() + std::ssize(text->before->record.pending));
  request.max_tokens = 0;
  request.sampling.seed = text->record.counters[0];
  request.end_turn.reset();
  request.echo = false;
  const auto drawn = text->record.counters[1];
  return {text->prefilled, text->decoded, drawn - std::min(drawn, static_cast<std::uint64_t>(request.rewind))};
}

// Returns the text after a request. Throws IoError(content) for a state that is not finite: its file could not be
// loaded.
std::shared_ptr<StoredText> LocalEngine::text_after(const Reply& reply) const {
  const auto state = model_->state(reply.slot, reply.state_tokens());
  auto text = reply.stored(store_.stored(state));
  const auto checked = reply.from() ? text_memory_.full_pages(reply.from()->state_tokens()) : 0;
  store_.format().check(text->record, state, static_cast<std::size_t>(checked));
  return text;
}

HeldText LocalEngine::held_text(std::shared_ptr<const StoredText> text) {
  const auto pending = std::ssize(text->record.pending);
  return {std::move(text), pending};
}

std::string LocalEngine::save(const HeldText& text) const {
  return store_.format().bytes(*std::static_pointer_cast<const StoredText>(text.text));
}

std::vector<std::string> LocalEngine::set_aside() const {
  return store_.files() != nullptr ? store_.files()->all_set_aside() : std::vector<std::string>();
}

void LocalEngine::keep_unwritten() {
  if (store_.files() != nullptr) store_.files()->keep_unwritten();
}

std::string fingerprint(const nn::LanguageModel& model) {
  io::Sha256 hash;
  hash.update(io::as_bytes(nn::to_json(model.config()).dump()));
  for (const auto& parameter : model.named_parameters()) {
    hash.update(io::as_bytes(parameter.key()));
    const auto value = parameter.value().detach().cpu().contiguous();
    hash.update({static_cast<const std::uint8_t*>(value.data_ptr()), static_cast<std::size_t>(value.nbytes())});
  }
  return hash.digest();
}

}  // namespace efla::engine
