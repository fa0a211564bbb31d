#include "efla/generate/session.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/error.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/sha256.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"

namespace efla::generate {
namespace {

using io::NamedTensor;
using io::TensorType;

constexpr const char* kFormat = "efla session 1";

template <class T>
NamedTensor entry(const char* name, TensorType type, const std::vector<T>& values) {
  return {name,
          type,
          {static_cast<std::int64_t>(values.size())},
          {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(T)}};
}

[[noreturn]] void refuse(const io::SafetensorsFile& file, const std::string& what) {
  throw IoError(IoError::Kind::content, file.path(), -1, what);
}

// Reads a vector of the file, of any size or of `size`.
template <class T>
std::vector<T> vector_of(const io::SafetensorsFile& file, const char* name, TensorType type, std::int64_t size = -1) {
  const auto* tensor = file.find(name);
  if (!tensor || tensor->type != type || tensor->shape.size() != 1 || (size >= 0 && tensor->shape[0] != size)) {
    refuse(file, std::string("not a session: ") + name + " is missing or of another type or size");
  }
  std::vector<T> values(tensor->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

template <class T>
void check_ids(const io::SafetensorsFile& file, const std::vector<T>& ids, std::int64_t vocab_size) {
  for (const auto id : ids) {
    if (id < 0 || id >= vocab_size) refuse(file, "not a session: token " + std::to_string(id));
  }
}

const std::string& metadata(const io::SafetensorsFile& file, const char* field) {
  const auto found = file.metadata().find(field);
  if (found == file.metadata().end()) refuse(file, std::string("not a session: its metadata has no ") + field);
  return found->second;
}

}  // namespace

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

std::uint64_t save_session(const std::filesystem::path& path, const Session& session, const nn::LanguageModel& model) {
  const std::vector<std::uint64_t> counters{session.seed, session.draws,
                                            static_cast<std::uint64_t>(session.state.tokens)};
  const auto tensors = session.state.tensors();
  std::vector<NamedTensor> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back(nn::named_tensor(name, tensor));
  entries.push_back(entry("counters", TensorType::U64, counters));
  entries.push_back(entry("pending", TensorType::I64, session.pending));
  entries.push_back(entry("last_ids", TensorType::I32, session.last_ids));
  entries.push_back(entry("seen", TensorType::U8, session.seen.bits()));
  io::write_safetensors(path, entries, {{"format", kFormat}, {"model", fingerprint(model)}, {"held", session.held}});
  return std::filesystem::file_size(path);
}

Session load_session(const std::filesystem::path& path, const nn::LanguageModel& model) {
  const io::SafetensorsFile file(path);
  if (metadata(file, "format") != kFormat) refuse(file, std::string("not a session of the format ") + kFormat);
  if (const auto own = fingerprint(model); metadata(file, "model") != own) {
    throw Error("generate", "--load-session", file.path() + " of the model " + metadata(file, "model").substr(0, 12),
                "a session of this model, " + own.substr(0, 12));
  }
  const auto counters = vector_of<std::uint64_t>(file, "counters", TensorType::U64, 3);
  for (const auto counter : counters) {
    if (counter > INT64_MAX) refuse(file, "not a session: a counter of " + std::to_string(counter));
  }
  Session session(model, counters[0]);
  session.draws = counters[1];
  session.state.read(file, static_cast<std::int64_t>(counters[2]));
  session.pending = vector_of<std::int64_t>(file, "pending", TensorType::I64);
  session.last_ids = vector_of<std::int32_t>(file, "last_ids", TensorType::I32);
  session.seen.bits() =
      vector_of<std::uint8_t>(file, "seen", TensorType::U8, static_cast<std::int64_t>(session.seen.bits().size()));
  session.held = metadata(file, "held");
  check_ids(file, session.pending, model.config().vocab_size);
  check_ids(file, session.last_ids, model.config().vocab_size);
  return session;
}

}  // namespace efla::generate
