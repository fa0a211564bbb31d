#include "efla/io/tokens/token_shard.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/content_error.h"

namespace efla::io {
namespace {

static_assert(std::endian::native == std::endian::little, "token shards are mapped as they are: little-endian");

constexpr std::array<char, 8> kMagic{'E', 'F', 'L', 'A', 'T', 'O', 'K', 'S'};
constexpr std::uint32_t kShardVersion = 1;
constexpr std::int64_t kMaxVocabOf16Bits = 65536;
constexpr std::size_t kEndBytes = sizeof(std::uint64_t);
constexpr std::size_t kIdsAtATime = std::size_t{1} << 16;

// The header as it is stored in the file.
struct ShardHeader {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kShardVersion;
  std::uint32_t token_bytes = 0;
  std::uint64_t tokens = 0, documents = 0, vocab_size = 0;
  std::array<std::uint8_t, 32> fingerprint{}, sha256{};
  std::array<std::uint8_t, 20> zeros{};
  std::uint32_t checksum = 0;  // crc32 of the bytes before it
};
static_assert(sizeof(ShardHeader) == kTokenShardHeader && std::is_trivially_copyable_v<ShardHeader>);

ByteView bytes_of(const ShardHeader& header) {
  return {reinterpret_cast<const std::uint8_t*>(&header), sizeof(header)};
}

std::uint32_t checksum_of(const ShardHeader& header) {
  return static_cast<std::uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(&header), static_cast<uInt>(offsetof(ShardHeader, checksum))));
}

std::string to_hex(const std::array<std::uint8_t, 32>& bytes) {
  std::string digits;
  for (const auto b : bytes) digits += fmt::format("{:02x}", b);
  return digits;
}

std::array<std::uint8_t, 32> from_hex(const std::string& digits) {
  std::array<std::uint8_t, 32> bytes{};
  const auto* end = digits.data() + digits.size();
  for (std::size_t i = 0; i < bytes.size() && digits.size() == 2 * bytes.size(); ++i) {
    const auto* at = digits.data() + 2 * i;
    if (std::from_chars(at, at + 2, bytes[i], 16).ptr != at + 2) end = nullptr;
  }
  if (digits.size() != 2 * bytes.size() || end == nullptr) {
    throw Error("token shard", "fingerprint", "'" + digits + "'", "64 hexadecimal digits");
  }
  return bytes;
}

std::size_t token_bytes_for(std::int64_t vocab_size) { return vocab_size <= kMaxVocabOf16Bits ? 2 : 4; }

std::size_t padding_behind(std::uint64_t ids_bytes) { return static_cast<std::size_t>(-ids_bytes % kEndBytes); }

ShardHeader read_header(ByteView bytes, const std::string& path) {
  ShardHeader header;
  if (bytes.size() < sizeof(header)) fail_at(path, bytes.size(), "the header of a token shard is cut short");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kMagic) fail_at(path, 0, "not a token shard: it does not begin with EFLATOKS");
  if (header.version != kShardVersion) {
    fail_at(path, offsetof(ShardHeader, version),
            fmt::format("version {} of the token shard format, expected {}", header.version, kShardVersion));
  }
  if (header.checksum != checksum_of(header)) {
    fail_at(path, offsetof(ShardHeader, checksum), "the header of the token shard is corrupt: its checksum differs");
  }
  if (header.vocab_size == 0 || header.vocab_size > std::numeric_limits<std::int32_t>::max()) {
    fail_at(path, offsetof(ShardHeader, vocab_size), fmt::format("a vocabulary of {} tokens", header.vocab_size));
  }
  const auto expected = token_bytes_for(static_cast<std::int64_t>(header.vocab_size));
  if (header.token_bytes != expected) {
    fail_at(path, offsetof(ShardHeader, token_bytes),
            fmt::format("{} bytes per token, expected {} for a vocabulary of {}", header.token_bytes, expected,
                        header.vocab_size));
  }
  if (header.documents == 0) fail_at(path, offsetof(ShardHeader, documents), "a token shard without documents");
  return header;
}

// Returns the total number of bytes that the header describes; SIZE_MAX if it overflows.
std::size_t size_by(const ShardHeader& header) {
  std::uint64_t ids = 0, ends = 0, size = 0;
  if (__builtin_mul_overflow(header.tokens, std::uint64_t{header.token_bytes}, &ids) ||
      __builtin_mul_overflow(header.documents, std::uint64_t{kEndBytes}, &ends) ||
      __builtin_add_overflow(ids, sizeof(header) + padding_behind(ids), &size) ||
      __builtin_add_overflow(size, ends, &size)) {
    return SIZE_MAX;
  }
  return size;
}

std::uint64_t end_at(ByteView ends, std::size_t document) {
  std::uint64_t end = 0;
  std::memcpy(&end, ends.data() + document * kEndBytes, kEndBytes);
  return end;
}

template <class Stored, class Out>
void widen(const std::uint8_t* from, std::span<Out> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    Stored id = 0;
    std::memcpy(&id, from + i * sizeof(Stored), sizeof(Stored));
    out[i] = static_cast<Out>(id);
  }
}

template <class Out>
void read_ids(const TokenShardContent& content, std::int64_t begin, std::span<Out> out) {
  const auto* from = content.ids.data() + static_cast<std::size_t>(begin) * content.token_bytes;
  if (content.token_bytes == 2) {
    widen<std::uint16_t>(from, out);
  } else {
    widen<std::uint32_t>(from, out);
  }
}

}  // namespace

TokenShardContent parse_token_shard(ByteView bytes, const std::string& path) {
  const auto header = read_header(bytes, path);
  const auto size = size_by(header);
  if (bytes.size() < size) {
    fail_at(path, bytes.size(), fmt::format("the token shard is cut short: {} bytes of {}", bytes.size(), size));
  }
  if (bytes.size() > size) {
    fail_at(path, size, fmt::format("{} bytes after the end of the token shard", bytes.size() - size));
  }
  TokenShardContent content;
  content.tokens = static_cast<std::int64_t>(header.tokens);
  content.documents = static_cast<std::int64_t>(header.documents);
  content.vocab_size = static_cast<std::int64_t>(header.vocab_size);
  content.token_bytes = header.token_bytes;
  content.fingerprint = to_hex(header.fingerprint);
  content.sha256 = to_hex(header.sha256);
  content.ids = bytes.subspan(sizeof(header), static_cast<std::size_t>(header.tokens) * header.token_bytes);
  const auto ends_at = size - static_cast<std::size_t>(header.documents) * kEndBytes;
  content.ends = bytes.subspan(ends_at);
  std::uint64_t begin = 0;
  for (std::size_t d = 0; d < header.documents; ++d) {
    const auto end = end_at(content.ends, d);
    if (end <= begin || end > header.tokens) {
      fail_at(path, ends_at + d * kEndBytes,
              fmt::format("document {} ends at token {}, but begins at {} of {}", d, end, begin, header.tokens));
    }
    begin = end;
  }
  if (begin != header.tokens) {
    fail_at(path, size - kEndBytes, fmt::format("the last document ends at token {} of {}", begin, header.tokens));
  }
  return content;
}

TokenShard::TokenShard(const std::filesystem::path& path)
    : file_(path), content_(parse_token_shard(file_.bytes(), file_.path())) {}

std::int64_t TokenShard::document_end(std::int64_t document) const {
  return static_cast<std::int64_t>(end_at(content_.ends, static_cast<std::size_t>(document)));
}

std::int64_t TokenShard::document_of(std::int64_t token) const {
  std::int64_t low = 0, high = documents() - 1;
  while (low < high) {
    const auto middle = low + (high - low) / 2;
    if (document_end(middle) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void TokenShard::read(std::int64_t begin, std::span<std::int32_t> out) const { read_ids(content_, begin, out); }

void TokenShard::read(std::int64_t begin, std::span<std::int64_t> out) const { read_ids(content_, begin, out); }

void TokenShard::verify() const {
  const auto sum = sha256(file_.bytes().subspan(kTokenShardHeader));
  if (sum != content_.sha256) {
    fail_at(path(), kTokenShardHeader,
            fmt::format("the token shard is corrupt: sha256 {}, expected {}", sum, content_.sha256));
  }
  std::vector<std::int64_t> ids(kIdsAtATime);
  for (std::int64_t begin = 0; begin < tokens(); begin += static_cast<std::int64_t>(kIdsAtATime)) {
    const auto count = std::min(kIdsAtATime, static_cast<std::size_t>(tokens() - begin));
    const auto part = std::span(ids).first(count);
    read(begin, part);
    const auto bad = std::find_if(part.begin(), part.end(), [&](auto id) { return id >= content_.vocab_size; });
    if (bad == part.end()) continue;
    const auto token = static_cast<std::uint64_t>(begin + (bad - part.begin()));
    fail_at(path(), kTokenShardHeader + token * content_.token_bytes,
            fmt::format("token {} is {}, but the vocabulary has {}", token, *bad, content_.vocab_size));
  }
}

TokenShardWriter::TokenShardWriter(const std::filesystem::path& path, const TokenizerInfo& tokenizer)
    : file_(path), tokenizer_(tokenizer) {
  from_hex(tokenizer_.fingerprint);
  if (tokenizer_.vocab_size < 1 || tokenizer_.vocab_size > std::numeric_limits<std::int32_t>::max()) {
    throw Error("token shard", "vocab_size", std::to_string(tokenizer_.vocab_size), "1 to 2^31 - 1");
  }
  file_.write(bytes_of(ShardHeader{}));
}

void TokenShardWriter::append(std::span<const std::int32_t> ids) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](auto id) { return id < 0 || id >= tokenizer_.vocab_size; });
  if (bad != ids.end()) {
    throw Error("token shard", "id", std::to_string(*bad), fmt::format("0 to {}", tokenizer_.vocab_size - 1));
  }
  if (token_bytes_for(tokenizer_.vocab_size) == 2) {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    write_payload({reinterpret_cast<const std::uint8_t*>(narrow.data()), narrow.size() * sizeof(narrow[0])});
  } else {
    write_payload({reinterpret_cast<const std::uint8_t*>(ids.data()), ids.size_bytes()});
  }
  tokens_ += static_cast<std::int64_t>(ids.size());
}

void TokenShardWriter::end_document() {
  const auto end = static_cast<std::uint64_t>(tokens_);
  if (end == (ends_.empty() ? 0 : ends_.back())) {
    throw Error("token shard", "document", "one without tokens", "at least one token");
  }
  ends_.push_back(end);
}

std::string TokenShardWriter::commit() {
  if (ends_.empty() || std::cmp_not_equal(ends_.back(), tokens_)) {
    throw Error("token shard", "documents", "tokens of a document that has not ended, or no document",
                "whole documents");
  }
  ShardHeader header;
  header.token_bytes = static_cast<std::uint32_t>(token_bytes_for(tokenizer_.vocab_size));
  header.tokens = static_cast<std::uint64_t>(tokens_);
  header.documents = ends_.size();
  header.vocab_size = static_cast<std::uint64_t>(tokenizer_.vocab_size);
  const std::array<std::uint8_t, kEndBytes> zeros{};
  write_payload(ByteView(zeros).first(padding_behind(header.tokens * header.token_bytes)));
  write_payload({reinterpret_cast<const std::uint8_t*>(ends_.data()), ends_.size() * kEndBytes});
  auto sum = checksum_.digest();
  header.fingerprint = from_hex(tokenizer_.fingerprint);
  header.sha256 = from_hex(sum);
  header.checksum = checksum_of(header);
  file_.overwrite(0, bytes_of(header));
  file_.commit();
  return sum;
}

void TokenShardWriter::write_payload(ByteView bytes) {
  checksum_.update(bytes);
  file_.write(bytes);
}

}  // namespace efla::io
