// The engine's sessions: rewinding, saving, loading.
#include <algorithm>
#include <cstring>
#include <utility>

#include "efla/base/check.h"
#include "efla/io/content_error.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/serve/local_engine.h"

namespace efla::serve {
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

generate::SessionModel LocalEngine::session_model() const { return {info_.model_sha256, info_.vocab_size, drawable_}; }

// Returns the tensors of a session's file that have the state, which they share.
std::vector<io::NamedTensor> LocalEngine::state_tensors(std::span<const float> state) const {
  std::vector<io::NamedTensor> tensors;
  for (const auto& part : model_->state_parts()) {
    const auto* floats = reinterpret_cast<const std::uint8_t*>(state.data() + part.offset);
    tensors.push_back({part.name, io::TensorType::F32, part.shape, {floats, part.floats * sizeof(float)}});
  }
  return tensors;
}

// Returns the text after a request. Throws IoError(content) for a state that is not finite: its file could not be
// loaded.
std::shared_ptr<StoredText> LocalEngine::text_after(const Job& job) const {
  auto state = model_->state(job.slot);
  const auto tensors = state_tensors(state);
  auto text = job.stored(std::make_shared<StoredState>(std::move(state)));  // keeps the memory of the state
  generate::check_session(text->record, tensors, "session", session_model());
  return text;
}

std::string LocalEngine::save(const std::string& name) const {
  const auto text = store_.peek(name);
  std::vector<float> state(info_.session_bytes / sizeof(float));
  if (text->state) text->state->copy_to(state);
  auto tensors = state_tensors(state);
  generate::check_session(text->record, tensors, "session " + name, session_model());
  text->record.append_to(tensors);
  return io::safetensors_bytes(tensors, text->record.metadata(info_.model_sha256));
}

void LocalEngine::load(const std::string& name, std::string_view bytes) {
  const std::string path = "session " + name;
  const auto content = io::parse_safetensors(io::as_bytes(bytes), path);
  auto text = std::make_shared<StoredText>();
  text->record = generate::read_session_record(content.tensors, content.metadata, path, session_model());
  std::vector<float> state(info_.session_bytes / sizeof(float));
  for (const auto& part : model_->state_parts()) {
    const auto found = std::find_if(content.tensors.begin(), content.tensors.end(),
                                    [&](const io::NamedTensor& tensor) { return tensor.name == part.name; });
    if (found == content.tensors.end() || found->type != io::TensorType::F32 || found->shape != part.shape) {
      io::fail_in(path, "not a session: " + part.name + " is missing or of another type or shape");
    }
    std::memcpy(state.data() + part.offset, found->bytes.data(), found->bytes.size());
  }
  text->state = std::make_shared<StoredState>(std::move(state));
  store_.put(name, std::move(text));
}

}  // namespace efla::serve
