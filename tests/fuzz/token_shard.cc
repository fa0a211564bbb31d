#include "efla/io/tokens/token_shard.h"

#include <algorithm>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void token_shard(io::ByteView bytes) {
  static const ScratchFolder folder;
  if (!accepts([&] { io::parse_token_shard(bytes, "input"); }, bytes.size())) return;
  const io::TokenShard shard(folder.write("shard", bytes));
  require(shard.tokens() > 0 && shard.documents() > 0, "a shard that holds something");
  std::int64_t begin = 0;
  for (std::int64_t d = 0; d < shard.documents(); ++d) {
    const auto end = shard.document_end(d);
    require(end > begin && shard.document_of(begin) == d && shard.document_of(end - 1) == d,
            "documents that follow one another");
    begin = end;
  }
  require(begin == shard.tokens(), "every token in a document");
  std::vector<std::int32_t> ids(static_cast<std::size_t>(shard.tokens()));
  shard.read(0, std::span(ids));
  const auto& content = shard.content();
  if (!accepts([&] { shard.verify(); }, bytes.size())) return;
  require(std::all_of(ids.begin(), ids.end(), [&](auto id) { return id >= 0 && id < content.vocab_size; }),
          "tokens of the vocabulary");
}

}  // namespace efla::fuzz
