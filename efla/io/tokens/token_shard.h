// Token shards: the ids of tokenized documents in files that are mapped. docs/token-shards.md describes the format.
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

// The tokenizer that made the ids. bos and eos are −1 if the tokenizer has none.
struct TokenizerInfo {
  std::string name;         // "bytes", or the model's file name
  std::string fingerprint;  // sha256 of its definition, 64 hexadecimal digits
  std::int64_t vocab_size = 0;
  std::int32_t bos = -1, eos = -1;

  bool operator==(const TokenizerInfo&) const = default;
};

inline constexpr std::size_t kTokenShardHeader = 128;

// A shard in memory. ends[d] is the end of document d, counted in tokens from the start of the shard; document d begins
// at the end of document d − 1. Both ranges point into the bytes of the file: little-endian, aligned like the mapping.
struct TokenShardContent {
  std::int64_t tokens = 0, documents = 0, vocab_size = 0;
  std::size_t token_bytes = 0;  // 2 or 4
  std::string fingerprint, sha256;
  ByteView ids;   // [tokens] uint16 or uint32
  ByteView ends;  // [documents] uint64, rising, the last one `tokens`
};

// Parses the header and checks everything except the checksum and the ids: magic, version, the header's own checksum,
// sizes against the size of the file, the ends of the documents. Throws IoError(content) with the byte offset. path is
// for messages.
TokenShardContent parse_token_shard(ByteView bytes, const std::string& path);

// A mapped shard. Throws like parse_token_shard and MappedFile.
class TokenShard {
 public:
  explicit TokenShard(const std::filesystem::path& path);

  const std::string& path() const { return file_.path(); }
  const TokenShardContent& content() const { return content_; }
  std::int64_t tokens() const { return content_.tokens; }
  std::int64_t documents() const { return content_.documents; }

  // Return the end of a document in [0, documents()), and the document that holds a token in [0, tokens()).
  std::int64_t document_end(std::int64_t document) const;
  std::int64_t document_of(std::int64_t token) const;

  // Copies ids [begin, begin + out.size()).
  void read(std::int64_t begin, std::span<std::int32_t> out) const;
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  // Reads everything. Throws IoError(content) if the checksum differs or an id is not below the vocabulary's size.
  void verify() const;

 private:
  MappedFile file_;
  TokenShardContent content_;
};

// Writes a shard under a temporary name; commit() renames it. Memory: 8 bytes per document.
class TokenShardWriter {
 public:
  TokenShardWriter(const std::filesystem::path& path, const TokenizerInfo& tokenizer);

  // Appends ids of the current document. Throws Error for an id outside of the vocabulary.
  void append(std::span<const std::int32_t> ids);
  // Ends the current document. Throws Error if it has no ids.
  void end_document();

  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(ends_.size()); }

  // Writes the rest and the header. Returns the payload's sha256. Throws Error if a document has not ended, or if there
  // is none.
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
