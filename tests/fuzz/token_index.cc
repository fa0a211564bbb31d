#include "efla/io/tokens/token_folder.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void token_index(io::ByteView bytes) {
  static const ScratchFolder folder;
  folder.write(io::kTokenIndexFile, bytes);
  io::TokenIndex index;
  if (!accepts([&] { index = io::read_token_index(folder.path()); }, bytes.size())) return;
  for (const auto& shard : index.shards) {
    require(shard.file.find('/') == std::string::npos, "shards in the folder itself");
    require(shard.tokens > 0 && shard.documents > 0, "shards that hold something");
  }
  io::write_token_index(folder.path(), index);
  const auto again = io::read_token_index(folder.path());
  require(again.tokenizer == index.tokenizer && again.tokens() == index.tokens() && again.source == index.source,
          "an index that reads back as it was written");
}

}  // namespace efla::fuzz
