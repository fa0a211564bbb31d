#include "efla/engine/session_record.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/io/content_error.h"

namespace efla::engine {
namespace {

using io::NamedTensor;
using io::TensorType;

constexpr const char* kFormat = "efla session 1";
constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 53;  // of a text

template <class Values>
NamedTensor entry(const char* name, TensorType type, const Values& values) {
  return {name,
          type,
          {static_cast<std::int64_t>(values.size())},
          {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(values[0])}};
}

// Returns a vector of the file with `size` elements, or with any number of elements for −1.
template <class T>
std::vector<T> vector_of(const std::vector<NamedTensor>& tensors, const std::string& path, const char* name,
                         TensorType type, std::int64_t size = -1) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& tensor) { return tensor.name == name; });
  if (found == tensors.end() || found->type != type || found->shape.size() != 1 ||
      (size >= 0 && found->shape[0] != size)) {
    io::fail_in(path, std::string("not a session: ") + name + " is missing or of another type or size");
  }
  std::vector<T> values(found->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), found->bytes.data(), found->bytes.size());
  return values;
}

template <class T>
void check_ids(const std::string& path, const std::vector<T>& ids, std::int64_t size) {
  for (const auto id : ids) {
    if (id < 0 || id >= size) {
      io::fail_in(path, "not a session: token " + std::to_string(id) + ", expected 0 to " + std::to_string(size - 1));
    }
  }
}

template <class T>
bool is_finite(const NamedTensor& tensor) {
  bool finite = true;
  for (std::size_t at = 0; at < tensor.bytes.size(); at += sizeof(T)) {
    T value;
    std::memcpy(&value, tensor.bytes.data() + at, sizeof(value));
    finite &= std::isfinite(to_float(value));
  }
  return finite;
}

bool is_finite(const NamedTensor& tensor) {
  if (tensor.type == TensorType::F32) return is_finite<float>(tensor);
  return tensor.type != TensorType::BF16 || is_finite<bfloat16>(tensor);
}

const std::string& field(const std::map<std::string, std::string>& metadata, const std::string& path,
                         const char* name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) io::fail_in(path, std::string("not a session: its metadata has no ") + name);
  return found->second;
}

}  // namespace

void remember(std::vector<std::int32_t>& last_ids, const data::Tokenizer& tokenizer, std::int32_t id) {
  if (tokenizer.bytes_of(id).empty()) return;
  last_ids.push_back(id);
  if (last_ids.size() > kLastIds) last_ids.erase(last_ids.begin());
}

void SessionRecord::append_to(std::vector<NamedTensor>& tensors) const {
  tensors.push_back(entry("counters", TensorType::U64, counters));
  tensors.push_back(entry("pending", TensorType::I64, pending));
  tensors.push_back(entry("last_ids", TensorType::I32, last_ids));
  tensors.push_back(entry("seen", TensorType::U8, seen));
}

std::map<std::string, std::string> session_metadata(const SessionRecord& record, const SessionModel& model) {
  std::map<std::string, std::string> metadata{{"format", kFormat}, {"model", model.sha256}, {"held", record.held}};
  if (!model.kv_cache_type.empty()) metadata["kv_cache_type"] = model.kv_cache_type;
  return metadata;
}

void check_session(const SessionRecord& record, std::span<const NamedTensor> state, const std::string& path,
                   const SessionModel& model) {
  const auto refuse = [&](const std::string& what) { io::fail_in(path, "not a session: " + what); };
  for (const auto counter : {record.counters[1], record.counters[2]}) {
    if (counter > kMostTokens)
      refuse("a count of " + std::to_string(counter) + " tokens, expected at most " + std::to_string(kMostTokens));
  }
  if (const auto bytes = (model.vocab_size + 7) / 8; std::cmp_not_equal(record.seen.size(), bytes)) {
    refuse("seen has " + std::to_string(record.seen.size()) + " bytes, expected " + std::to_string(bytes));
  }
  if (const auto last = record.last_ids.size(); last > kLastIds) {
    refuse(std::to_string(last) + " last ids, at most " + std::to_string(kLastIds));
  }
  if (utf8_prefix(record.held) != record.held.size()) refuse("a held text that is not UTF-8");
  check_ids(path, record.pending, model.ids);
  check_ids(path, record.last_ids, model.ids);
  for (const auto& tensor : state) {
    if (!is_finite(tensor)) refuse("the state " + tensor.name + " has numbers that are not finite");
  }
}

SessionRecord read_session_record(const std::vector<NamedTensor>& tensors,
                                  const std::map<std::string, std::string>& metadata, const std::string& path,
                                  const SessionModel& model) {
  if (field(metadata, path, "format") != kFormat) {
    io::fail_in(path, std::string("not a session of the format ") + kFormat);
  }
  if (const auto& of = field(metadata, path, "model"); of != model.sha256) {
    throw Error("generate", "session", path + " of the model " + of.substr(0, 12),
                "a session of this model, " + model.sha256.substr(0, 12));
  }
  if (!model.kv_cache_type.empty()) {
    if (const auto& type = field(metadata, path, "kv_cache_type"); type != model.kv_cache_type) {
      throw Error("generate", "session", path + " with keys and values in " + type,
                  "keys and values in " + model.kv_cache_type + " (kv_cache_type)");
    }
  }
  SessionRecord record;
  const auto counters = vector_of<std::uint64_t>(tensors, path, "counters", TensorType::U64, 3);
  std::copy(counters.begin(), counters.end(), record.counters.begin());
  record.pending = vector_of<std::int64_t>(tensors, path, "pending", TensorType::I64);
  record.last_ids = vector_of<std::int32_t>(tensors, path, "last_ids", TensorType::I32);
  record.seen = vector_of<std::uint8_t>(tensors, path, "seen", TensorType::U8);
  record.held = field(metadata, path, "held");
  check_session(record, tensors, path, model);
  return record;
}

}  // namespace efla::engine
