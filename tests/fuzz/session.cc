#include "efla/engine/session_record.h"

#include <algorithm>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void session(io::ByteView bytes) {
  constexpr std::int64_t kVocabSize = 16;
  engine::SessionRecord record;
  const auto read = [&] {
    const auto content = io::parse_safetensors(bytes, "input");
    const auto model = content.metadata.find("model");  // so that no file is refused as of another model
    record = engine::read_session_record(
        content.tensors, content.metadata, "input",
        {.sha256 = model == content.metadata.end() ? "" : model->second, .vocab_size = kVocabSize, .ids = kVocabSize});
  };
  if (!accepts(read, bytes.size())) return;
  const auto known = [](std::int64_t id) { return id >= 0 && id < kVocabSize; };
  require(std::all_of(record.pending.begin(), record.pending.end(), known), "pending ids of the vocabulary");
  require(std::all_of(record.last_ids.begin(), record.last_ids.end(), known), "last ids of the vocabulary");
  require(record.last_ids.size() <= engine::kLastIds, "few last ids");
  require(record.seen.size() == kVocabSize / 8, "a bit per id");
  for (const auto counter : {record.counters[1], record.counters[2]}) {
    require(counter <= INT64_MAX, "counts of tokens that fit their type");
  }
}

}  // namespace efla::fuzz
