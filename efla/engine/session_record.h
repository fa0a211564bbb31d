// The part of a session's file that is not the model's state (docs/generation.md): read and written here for every kind
// of state.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::engine {

// The number of ids to keep: the bytes of an unfinished character, at most three, come from at most this many ids.
inline constexpr std::size_t kLastIds = 3;

// Appends an id that stands for bytes to the last ids of a text, and keeps the last kLastIds of them.
void remember(std::vector<std::int32_t>& last_ids, const data::Tokenizer& tokenizer, std::int32_t id);

struct SessionRecord {
  std::array<std::uint64_t, 3> counters{};  // seed, ids drawn, tokens in the state
  std::vector<std::int64_t> pending;
  std::vector<std::int32_t> last_ids;
  std::vector<std::uint8_t> seen;  // as SeenIds::bits
  std::string held;

  // Appends the record's tensors, which share the record's memory, to a state's tensors.
  void append_to(std::vector<io::NamedTensor>& tensors) const;
};

// The properties of a model that its sessions must match.
struct SessionModel {
  std::string sha256 = {};         // fingerprint
  std::string kv_cache_type = {};  // of pages with keys and values; empty: the model has no pages
  std::int64_t vocab_size = 0;     // number of ids of the model
  std::int64_t ids = 0;            // texts may have the ids from 0 to ids − 1
};

// Throws IoError(content) for a session that cannot be continued: counts of tokens beyond 2^53, ids that texts cannot
// have, vectors of another size, non-finite numbers in the state, a held text that is not UTF-8. Every seed is valid.
// Is called before a session is saved and after one is read, so that every saved session can be loaded. state: may have
// other tensors too.
void check_session(const SessionRecord& record, std::span<const io::NamedTensor> state, const std::string& path,
                   const SessionModel& model);

// Returns the metadata of a session's file.
std::map<std::string, std::string> session_metadata(const SessionRecord& record, const SessionModel& model);

// Returns the record of a file with these tensors, for which check_session has passed. Throws Error if another model
// saved it, or this one with keys and values of another type, IoError(content) for a file that is not a session. path
// is for messages.
SessionRecord read_session_record(const std::vector<io::NamedTensor>& tensors,
                                  const std::map<std::string, std::string>& metadata, const std::string& path,
                                  const SessionModel& model);

}  // namespace efla::engine
