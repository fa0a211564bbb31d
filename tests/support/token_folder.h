// Folders of token shards with given documents.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "efla/io/tokens/token_folder.h"

namespace efla::test {

// Writes shards of the documents, `per_shard` documents each, to an existing folder.
inline void write_token_folder(const std::filesystem::path& folder,
                               const std::vector<std::vector<std::int32_t>>& documents, std::size_t per_shard,
                               const io::TokenizerInfo& tokenizer) {
  io::TokenIndex index;
  index.tokenizer = tokenizer;
  for (std::size_t begin = 0; begin < documents.size(); begin += per_shard) {
    const auto name = fmt::format("shard-{:05}.tokens", index.shards.size());
    io::TokenShardWriter writer(folder / name, tokenizer);
    for (std::size_t d = begin; d < std::min(begin + per_shard, documents.size()); ++d) {
      writer.append(documents[d]);
      writer.end_document();
    }
    io::TokenIndex::Shard shard{name, writer.tokens(), writer.documents(), ""};
    shard.sha256 = writer.commit();
    index.shards.push_back(shard);
  }
  io::write_token_index(folder, index);
}

}  // namespace efla::test
