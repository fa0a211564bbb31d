// A folder of token shards and the index.json that names them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/tokens/token_shard.h"

namespace efla::io {

inline constexpr const char* kTokenIndexFile = "index.json";

struct TokenIndex {
  struct Shard {
    std::string file;  // a plain name in the folder
    std::int64_t tokens = 0, documents = 0;
    std::string sha256;
  };

  struct Position {
    std::int64_t input = 0, document = 0;
  };

  TokenizerInfo tokenizer;
  std::vector<Shard> shards;      // in the order of the documents
  nlohmann::ordered_json source;  // how the shards were made; must be equal before more shards are added
  // The position at which the writer resumes, in a document of an input file. Empty when every shard is written.
  std::optional<Position> unfinished;

  std::int64_t tokens() const;
  std::int64_t documents() const;
};

// Read and write the index of a folder. Reading throws IoError: missing if there is none, content if it is invalid.
TokenIndex read_token_index(const std::filesystem::path& folder);
void write_token_index(const std::filesystem::path& folder, const TokenIndex& index);

// The folder's documents as one row of tokens, from the first token of the first shard to the last of the last shard.
class TokenFolder {
 public:
  // Maps every shard and checks it against the index: sizes, counts and tokenizer, but not the contents (see verify).
  // Throws IoError like read_token_index and TokenShard, and for a folder that is unfinished or holds no token.
  explicit TokenFolder(const std::filesystem::path& folder);

  const TokenIndex& index() const { return index_; }
  const TokenizerInfo& tokenizer() const { return index_.tokenizer; }
  const std::vector<TokenShard>& shards() const { return shards_; }
  std::int64_t tokens() const { return begins_.back(); }
  std::int64_t documents() const { return index_.documents(); }

  // Returns the end of the document that holds the token, which is in [0, tokens()).
  std::int64_t document_end(std::int64_t token) const;
  // Copies the ids of tokens [begin, begin + out.size()).
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  // Calls TokenShard::verify for every shard.
  void verify() const;

 private:
  std::size_t shard_of(std::int64_t token) const;

  TokenIndex index_;
  std::vector<TokenShard> shards_;
  std::vector<std::int64_t> begins_;  // [shards + 1] first token of each shard
};

}  // namespace efla::io
