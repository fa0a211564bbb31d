// The engine's sessions: rewinding, saving, loading.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "efla/base/check.h"
#include "efla/io/content_error.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/serve/local_engine.h"

namespace efla::serve {
namespace {

constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 53;  // of a text in a file

}  // namespace

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

std::string LocalEngine::save(const std::string& name) const {
  const auto text = store_.peek(name);
  std::vector<float> state(info_.session_bytes / sizeof(float));
  if (text->state) text->state->copy_to(state);
  std::vector<io::NamedTensor> tensors;
  const std::vector<nn::StatePart> parts = model_->state_parts();
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
  text->record =
      generate::read_session_record(content.tensors, content.metadata, path, info_.model_sha256, info_.vocab_size);
  if (text->record.counters[2] > kMostTokens) io::fail_in(path, "not a session: a text of too many tokens");
  for (const auto id : text->record.last_ids) {
    if (id >= drawable_) io::fail_in(path, "not a session: token " + std::to_string(id));
  }
  for (const auto id : text->record.pending) {
    if (id >= drawable_) io::fail_in(path, "not a session: token " + std::to_string(id));
  }
  std::vector<float> state(info_.session_bytes / sizeof(float));
  for (const auto& part : model_->state_parts()) {
    const auto found = std::find_if(content.tensors.begin(), content.tensors.end(),
                                    [&](const io::NamedTensor& tensor) { return tensor.name == part.name; });
    if (found == content.tensors.end() || found->type != io::TensorType::F32 || found->shape != part.shape) {
      io::fail_in(path, "not a session: " + part.name + " is missing or of another type or shape");
    }
    std::memcpy(state.data() + part.offset, found->bytes.data(), found->bytes.size());
  }
  if (!std::all_of(state.begin(), state.end(), [](float x) { return std::isfinite(x); })) {
    io::fail_in(path, "not a session: a state with numbers that are not finite");
  }
  text->state = std::make_shared<StoredState>(std::move(state));
  store_.put(name, std::move(text));
}

}  // namespace efla::serve
