#include <algorithm>
#include <memory>
#include <string_view>

#include "efla/engine/session_format.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void session(io::ByteView bytes) {
  constexpr std::int64_t kVocabSize = 16;
  std::shared_ptr<engine::StoredText> text;
  const auto read = [&] {
    auto metadata = io::parse_safetensors(bytes, "input").metadata;
    // Of the same model, so that no file is refused as of another one; with pages where the file has their type.
    const engine::SessionModel model{metadata["model"], metadata["kv_cache_type"], kVocabSize, kVocabSize};
    const engine::SessionFormat format(model, [&](std::int64_t tokens) {
      const auto pages = model.kv_cache_type.empty() ? 0 : (tokens + 63) / 64;
      return engine::StateLayout{.parts = {{"state", {2}, 0, 2}}, .pages = pages, .page_bytes = 8};
    });
    const auto again = [&](std::string_view file) {
      return format.read(file, "input", std::make_shared<engine::StoredPages>()).text;
    };
    text = again({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    require(again(format.bytes(*text))->tokens() == text->tokens(), "a session that can be saved and read again");
  };
  if (!accepts(read, bytes.size())) return;
  const auto& record = text->record;
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
