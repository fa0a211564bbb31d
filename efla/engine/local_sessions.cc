// The engine's sessions: rewinding, saving, loading.
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
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

SessionModel LocalEngine::session_model() const {
  return {info_.model_sha256, info_.kv_cache_type, info_.vocab_size, drawable_};
}

namespace {

std::string page_name(std::size_t page) { return "pages." + std::to_string(page); }

io::TensorType page_type(const StateLayout& layout) {
  return layout.page_type == nn::KeyValueType::float32 ? io::TensorType::F32 : io::TensorType::BF16;
}

std::vector<std::int64_t> page_shape(const StateLayout& layout) {
  return {static_cast<std::int64_t>(layout.page_bytes / io::type_bytes(page_type(layout)))};
}

}  // namespace

// Returns the tensors of a session's file that have the state, whose memory they share, without the first pages.
std::vector<io::NamedTensor> LocalEngine::state_tensors(const nn::TextState& state, std::size_t first_page) const {
  std::vector<io::NamedTensor> tensors;
  const auto layout = model_->layout(state.tokens);
  for (const auto& part : layout.parts) {
    const auto* floats = reinterpret_cast<const std::uint8_t*>(state.constant->data() + part.offset);
    tensors.push_back({part.name, io::TensorType::F32, part.shape, {floats, part.floats * sizeof(float)}});
  }
  for (std::size_t i = first_page; i < state.pages.size(); ++i) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(state.pages[i]->data());
    tensors.push_back({page_name(i), page_type(layout), page_shape(layout), {bytes, layout.page_bytes}});
  }
  return tensors;
}

// Returns the text after a request. Throws IoError(content) for a state that is not finite: its file could not be
// loaded.
std::shared_ptr<StoredText> LocalEngine::text_after(const Reply& reply) const {
  const auto state = model_->state(reply.slot, reply.state_tokens());
  auto text = reply.stored(store_.stored(state));
  const auto checked = reply.from() ? text_memory_.full_pages(reply.from()->state_tokens()) : 0;
  check_session(text->record, state_tensors(state, static_cast<std::size_t>(checked)), "session", session_model());
  return text;
}

std::string LocalEngine::save(const std::string& name) const {
  const auto text = store_.peek(name);
  nn::TextState state{0, std::make_shared<std::vector<float>>(info_.session_bytes / sizeof(float))};
  if (text->state) state = text->state->get();
  auto tensors = state_tensors(state, 0);
  text->record.append_to(tensors);
  return io::safetensors_bytes(tensors, session_metadata(text->record, session_model()));
}

void LocalEngine::load(const std::string& name, std::string_view bytes) {
  const std::string path = "session " + name;
  const auto content = io::parse_safetensors(io::as_bytes(bytes), path);
  auto text = std::make_shared<StoredText>();
  text->record = read_session_record(content.tensors, content.metadata, path, session_model());
  const auto tokens = text->state_tokens();
  std::map<std::string_view, const io::NamedTensor*> tensors;
  for (const auto& tensor : content.tensors) tensors[tensor.name] = &tensor;
  const auto find = [&](const std::string& part, io::TensorType type, const std::vector<std::int64_t>& shape) {
    const auto tensor = tensors.find(part);
    if (tensor == tensors.end() || tensor->second->type != type || tensor->second->shape != shape) {
      io::fail_in(path, "not a session: " + part + " is missing or of another type or shape");
    }
    return tensor->second->bytes;
  };
  const auto layout = model_->layout(tokens);
  for (const auto& part : layout.parts) find(part.name, io::TensorType::F32, part.shape);
  const auto page = [&](std::size_t i) { return find(page_name(i), page_type(layout), page_shape(layout)); };
  for (std::size_t i = 0; std::cmp_less(i, layout.pages); ++i) page(i);
  // All are there, so that the file is as large as the memory for the number of tokens that it says.
  std::vector<float> constant(layout.constant_bytes() / sizeof(float));
  for (const auto& part : layout.parts) {
    std::ranges::copy(tensors.at(part.name)->bytes, reinterpret_cast<std::uint8_t*>(constant.data() + part.offset));
  }
  nn::TextState state{tokens, std::make_shared<std::vector<float>>(std::move(constant))};
  for (std::size_t i = 0; std::cmp_less(i, layout.pages); ++i) {
    const auto from = std::as_bytes(page(i));
    state.pages.push_back(std::make_shared<nn::PageBytes>(from.begin(), from.end()));
  }
  text->state = store_.stored(state);
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
