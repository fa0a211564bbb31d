// Token shards: the ids of tokenized documents in files that are mapped, not read. docs/token-shards.md has the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/file.h"
#include "efla/io/sha256.h"

namespace efla::io {

// Which tokenizer made ids. bos and eos are −1 where there is none.
struct TokenizerInfo {
  std::string name;         // "bytes", or the model's file name
  std::string fingerprint;  // sha256 of what defines it, 64 hexadecimal digits
  std::int64_t vocab_size = 0;
  std::int32_t bos = -1, eos = -1;

  bool operator==(const TokenizerInfo&) const = default;
};

inline constexpr std::size_t kTokenShardHeader = 128;

// A shard in memory. ends[d] is where document d ends, counted in tokens from the shard's start; d begins where d − 1
// ends. Both ranges point into the file's bytes: little-endian, aligned as the mapping is.
struct TokenShardContent {
  std::int64_t tokens = 0, documents = 0, vocab_size = 0;
  std::size_t token_bytes = 0;  // 2 or 4
  std::string fingerprint, sha256;
  ByteView ids;   // [tokens] uint16 or uint32
  ByteView ends;  // [documents] uint64, rising, the last one `tokens`
};

// Reads the header and checks all but the checksum and the ids: magic, version, the header's own checksum, sizes
// against the file's, the documents' ends. Throws IoError(content) with the byte offset. path is for messages.
TokenShardContent parse_token_shard(ByteView bytes, const std::string& path);

// A mapped shard. Throws as parse_token_shard and MappedFile do.
class TokenShard {
 public:
  explicit TokenShard(const std::filesystem::path& path);

  const std::string& path() const { return file_.path(); }
  const TokenShardContent& content() const { return content_; }
  std::int64_t tokens() const { return content_.tokens; }
  std::int64_t documents() const { return content_.documents; }

  // End of a document in [0, documents()), and the document that holds a token in [0, tokens()).
  std::int64_t document_end(std::int64_t document) const;
  std::int64_t document_of(std::int64_t token) const;

  // Copies ids [begin, begin + out.size()).
  void read(std::int64_t begin, std::span<std::int32_t> out) const;
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  // Reads everything: throws IoError(content) where the checksum differs or an id is not below the vocabulary's size.
  void verify() const;

 private:
  MappedFile file_;
  TokenShardContent content_;
};

// Writes a shard under a temporary name; commit() gives it its own. Memory: 8 bytes a document.
class TokenShardWriter {
 public:
  TokenShardWriter(const std::filesystem::path& path, const TokenizerInfo& tokenizer);

  // Ids of the document at hand. Throws Error for one outside of the vocabulary.
  void append(std::span<const std::int32_t> ids);
  // Ends the document at hand; one without ids is refused with an Error.
  void end_document();

  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(ends_.size()); }

  // Writes the rest and the header; returns the payload's sha256.
  std::string commit();

 private:
  void write_payload(ByteView bytes);

  AtomicFile file_;
  TokenizerInfo tokenizer_;
  Sha256 checksum_;
  std::vector<std::uint64_t> ends_;
  std::int64_t tokens_ = 0;
};

}  // namespace efla::io
