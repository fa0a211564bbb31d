// A folder of token shards and the index.json that names them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/token_shard.h"

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
  nlohmann::ordered_json source;  // what made them; compared as a whole before making more
  // Where its writer goes on: at a document of an input file. Nothing once every shard is there.
  std::optional<Position> unfinished;

  std::int64_t tokens() const;
  std::int64_t documents() const;
};

// The index of a folder. read throws IoError: missing where there is none, content for anything that is not as written.
TokenIndex read_token_index(const std::filesystem::path& folder);
void write_token_index(const std::filesystem::path& folder, const TokenIndex& index);

// The folder's documents as one row of tokens, from the first shard's first to the last shard's last.
class TokenFolder {
 public:
  // Maps every shard and checks it against the index (sizes, counts, tokenizer; not the contents: verify). Throws
  // IoError as read_token_index and TokenShard do, and for a folder that is not finished or holds no token.
  explicit TokenFolder(const std::filesystem::path& folder);

  const TokenIndex& index() const { return index_; }
  const TokenizerInfo& tokenizer() const { return index_.tokenizer; }
  const std::vector<TokenShard>& shards() const { return shards_; }
  std::int64_t tokens() const { return begins_.back(); }
  std::int64_t documents() const { return index_.documents(); }

  // Where the document that holds a token in [0, tokens()) ends.
  std::int64_t document_end(std::int64_t token) const;
  // Copies ids [begin, begin + out.size()).
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  // TokenShard::verify of every shard.
  void verify() const;

 private:
  std::size_t shard_of(std::int64_t token) const;

  TokenIndex index_;
  std::vector<TokenShard> shards_;
  std::vector<std::int64_t> begins_;  // [shards + 1] first token of each
};

}  // namespace efla::io
