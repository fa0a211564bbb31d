// The engine's sessions: rewinding, saving, loading.
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "efla/base/check.h"
#include "efla/engine/local_engine.h"
#include "efla/io/content_error.h"
#include "efla/io/safetensors/safetensors.h"
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
  request.prompt.resize(text->since->size());
  text->since->copy_to(request.prompt);
  request.prompt.resize(request.prompt.size() - static_cast<std::size_t>(request.rewind));
  request.prompt.erase(request.prompt.begin(), request.prompt.begin() + std::ssize(text->before->record.pending));
  request.max_tokens = 0;
  request.sampling.seed = text->record.counters[0];
  request.end_turn.reset();
  request.echo = false;
  const auto drawn = text->record.counters[1];
  return {text->prefilled, text->decoded, drawn - std::min(drawn, static_cast<std::uint64_t>(request.rewind))};
}

SessionModel LocalEngine::session_model() const { return {info_.model_sha256, info_.vocab_size, drawable_}; }

// Returns the tensors of a session's file that have the state, which they share.
std::vector<io::NamedTensor> LocalEngine::state_tensors(std::span<const float> state, std::int64_t tokens) const {
  std::vector<io::NamedTensor> tensors;
  for (const auto& part : model_->state_parts(tokens)) {
    const auto* floats = reinterpret_cast<const std::uint8_t*>(state.data() + part.offset);
    tensors.push_back({part.name, io::TensorType::F32, part.shape, {floats, part.floats * sizeof(float)}});
  }
  return tensors;
}

// Returns the text after a request. Throws IoError(content) for a state that is not finite: its file could not be
// loaded.
std::shared_ptr<StoredText> LocalEngine::text_after(const Reply& reply) const {
  auto state = model_->state(reply.slot);
  const auto tensors = state_tensors(state, reply.state_tokens());
  auto text = reply.stored(std::make_shared<StoredState>(std::move(state)));  // keeps the memory of the state
  check_session(text->record, tensors, "session", session_model());
  return text;
}

std::string LocalEngine::save(const std::string& name) const {
  const auto text = store_.peek(name);
  std::vector<float> state(state_bytes(text->state_tokens()) / sizeof(float));
  if (text->state) text->state->copy_to(state);
  auto tensors = state_tensors(state, text->state_tokens());
  check_session(text->record, tensors, "session " + name, session_model());
  text->record.append_to(tensors);
  return io::safetensors_bytes(tensors, text->record.metadata(info_.model_sha256));
}

void LocalEngine::load(const std::string& name, std::string_view bytes) {
  const std::string path = "session " + name;
  const auto content = io::parse_safetensors(io::as_bytes(bytes), path);
  auto text = std::make_shared<StoredText>();
  text->record = read_session_record(content.tensors, content.metadata, path, session_model());
  const auto parts = model_->state_parts(text->state_tokens());
  std::vector<io::ByteView> found;  // all, before there is memory for the number of tokens that the file says
  for (const auto& part : parts) {
    const auto tensor = std::ranges::find(content.tensors, part.name, &io::NamedTensor::name);
    if (tensor == content.tensors.end() || tensor->type != io::TensorType::F32 || tensor->shape != part.shape) {
      io::fail_in(path, "not a session: " + part.name + " is missing or of another type or shape");
    }
    found.push_back(tensor->bytes);
  }
  std::vector<float> state(state_bytes(text->state_tokens()) / sizeof(float));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::ranges::copy(found[i], reinterpret_cast<std::uint8_t*>(state.data() + parts[i].offset));
  }
  text->state = std::make_shared<StoredState>(std::move(state));
  store_.put(name, std::move(text));
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
