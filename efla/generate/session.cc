#include "efla/generate/session.h"

#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "efla/generate/session_record.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/sha256.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"

namespace efla::generate {

Session::Session(const nn::LanguageModel& model, std::uint64_t seed)
    : state(model.initial_state(1)), seen(model.config().vocab_size), seed(seed) {}

Session Session::clone() const {
  Session copy = *this;
  copy.state = state.clone();
  return copy;
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

namespace {

SessionModel session_model(const nn::LanguageModel& model) {
  const auto size = model.config().vocab_size;
  return {fingerprint(model), size, size};
}

}  // namespace

std::uint64_t save_session(const std::filesystem::path& path, const Session& session, const nn::LanguageModel& model) {
  const SessionRecord record{{session.seed, session.draws, static_cast<std::uint64_t>(session.state.tokens)},
                             session.pending,
                             session.last_ids,
                             session.seen.bits(),
                             session.held};
  const auto tensors = session.state.tensors();
  std::vector<io::NamedTensor> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back(nn::named_tensor(name, tensor));
  const auto of = session_model(model);
  check_session(record, entries, path.string(), of);
  record.append_to(entries);
  io::write_safetensors(path, entries, record.metadata(of.sha256));
  return std::filesystem::file_size(path);
}

Session load_session(const std::filesystem::path& path, const nn::LanguageModel& model) {
  const io::SafetensorsFile file(path);
  auto record = read_session_record(file.tensors(), file.metadata(), file.path(), session_model(model));
  Session session(model, record.counters[0]);
  session.draws = record.counters[1];
  session.state.read(file, static_cast<std::int64_t>(record.counters[2]));
  session.pending = std::move(record.pending);
  session.last_ids = std::move(record.last_ids);
  session.seen.bits() = std::move(record.seen);
  session.held = std::move(record.held);
  return session;
}

}  // namespace efla::generate
