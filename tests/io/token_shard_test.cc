#include "efla/io/tokens/token_shard.h"

#include <zlib.h>

#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "efla/io/tokens/token_folder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::expect_error;
using test::read_text;
using test::TempFolder;
using test::write_text;

using Ids = std::vector<std::int32_t>;

constexpr std::size_t kVersionAt = 8, kTokenBytesAt = 12, kTokensAt = 16, kDocumentsAt = 24, kVocabAt = 32, kSumAt = 72,
                      kChecksumAt = 124;

TokenizerInfo tokenizer(std::int64_t vocab_size = 258) { return {"bytes", sha256(as_bytes("t")), vocab_size, -1, 257}; }

// A shard of these documents; the file's sha256.
std::string write_shard(const std::filesystem::path& path, const std::vector<Ids>& documents,
                        std::int64_t vocab_size = 258) {
  TokenShardWriter writer(path, tokenizer(vocab_size));
  for (const auto& document : documents) {
    writer.append(document);
    writer.end_document();
  }
  return writer.commit();
}

std::string shard_of(const std::vector<Ids>& documents, std::int64_t vocab_size = 258) {
  const TempFolder folder;
  write_shard(folder / "s", documents, vocab_size);
  return read_text(folder / "s");
}

void put(std::string& bytes, std::size_t at, std::uint64_t value, std::size_t size) {
  std::memcpy(bytes.data() + at, &value, size);
}

// The bytes with another field in the header, whose checksum fits again.
std::string with(std::string bytes, std::size_t at, std::uint64_t value, std::size_t size) {
  put(bytes, at, value, size);
  put(bytes, kChecksumAt, ::crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), kChecksumAt), 4);
  return bytes;
}

void refused(const std::string& bytes, std::size_t offset, const std::string& says) {
  expect_bad_content([&] { parse_token_shard(as_bytes(bytes), "x.tokens"); }, static_cast<std::int64_t>(offset), says);
}

TEST(TokenShard, ComesBackAsItWasWritten) {
  const TempFolder folder;
  for (const std::int64_t vocab : {258, 65536, 65537, 1 << 30}) {
    const std::vector<Ids> documents{{1, 2, 257}, {7}, {0, 0, 0, 0, static_cast<std::int32_t>(vocab) - 1}};
    const auto sum = write_shard(folder / "s", documents, vocab);
    const TokenShard shard(folder / "s");
    EXPECT_EQ(shard.content().token_bytes, vocab <= 65536 ? 2U : 4U);
    EXPECT_EQ(shard.content().sha256, sum);
    EXPECT_EQ(sum, sha256(as_bytes(read_text(folder / "s").substr(kTokenShardHeader))));
    EXPECT_EQ(shard.content().fingerprint, tokenizer().fingerprint);
    EXPECT_EQ(shard.content().vocab_size, vocab);
    ASSERT_EQ(shard.tokens(), 9);
    ASSERT_EQ(shard.documents(), 3);
    EXPECT_NO_THROW(shard.verify());
    std::int64_t begin = 0;
    for (std::size_t d = 0; d < documents.size(); ++d) {
      const auto end = shard.document_end(static_cast<std::int64_t>(d));
      Ids ids(static_cast<std::size_t>(end - begin));
      shard.read(begin, std::span(ids));
      EXPECT_EQ(ids, documents[d]);
      for (; begin < end; ++begin) EXPECT_EQ(shard.document_of(begin), static_cast<std::int64_t>(d));
    }
    EXPECT_EQ(begin, shard.tokens());
  }
  EXPECT_EQ(folder.files(), 1U);
}

TEST(TokenShard, HasTheBytesOfTheFormat) {
  const auto bytes = shard_of({{1, 0x102}, {3}}, 300);
  const std::string payload(
      "\1\0\2\1\3\0\0\0"
      "\2\0\0\0\0\0\0\0"
      "\3\0\0\0\0\0\0\0",
      24);
  EXPECT_EQ(bytes.substr(kTokenShardHeader), payload);
  EXPECT_EQ(bytes.substr(0, 8), "EFLATOKS");
  EXPECT_EQ(bytes.substr(8, 32), std::string("\1\0\0\0\2\0\0\0\3\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\x2c\1\0\0\0\0\0\0", 32));
}

TEST(TokenShard, EveryCutAndEveryChangedByteIsFound) {
  const TempFolder folder;
  const auto whole = shard_of({{1, 2, 3}, {4}});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(parse_token_shard(as_bytes(whole).first(size), "x"), IoError) << size;
  }
  for (std::size_t at = 0; at < whole.size(); ++at) {
    auto changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    write_text(folder / "s", changed);
    EXPECT_THROW(TokenShard(folder / "s").verify(), IoError) << at;
  }
}

TEST(TokenShard, SaysWhatIsWrongAndWhere) {
  const auto good = shard_of({{1, 2, 3}, {4}});
  refused("", 0, "header of a token shard is cut short");
  refused(good.substr(0, 100), 100, "header of a token shard is cut short");
  refused("PK" + good.substr(2), 0, "not a token shard");
  refused(with(good, kVersionAt, 2, 4), kVersionAt, "version 2 of the token shard format, expected 1");
  auto corrupt = good;
  put(corrupt, kTokensAt, 5, 8);
  refused(corrupt, kChecksumAt, "its checksum differs");
  refused(with(good, kVocabAt, 0, 8), kVocabAt, "a vocabulary of 0 tokens");
  refused(with(good, kVocabAt, 1ULL << 31, 8), kVocabAt, "a vocabulary of 2147483648 tokens");
  refused(with(good, kTokenBytesAt, 4, 4), kTokenBytesAt, "4 bytes per token, expected 2 for a vocabulary of 258");
  refused(with(good, kDocumentsAt, 0, 8), kDocumentsAt, "without documents");
  refused(good.substr(0, good.size() - 1), good.size() - 1, "the token shard is cut short: 151 bytes of 152");
  refused(good + "x", good.size(), "1 bytes after the end of the token shard");
  refused(with(good, kTokensAt, ~0ULL, 8), good.size(), "is cut short");
  refused(with(good, kDocumentsAt, 1ULL << 61, 8), good.size(), "is cut short");
  auto ends = good;
  put(ends, good.size() - 16, 4, 8);
  refused(ends, good.size() - 8, "document 1 ends at token 4, but begins at 4 of 4");
  put(ends, good.size() - 16, 3, 8);
  put(ends, good.size() - 8, 5, 8);
  refused(ends, good.size() - 8, "document 1 ends at token 5, but begins at 3 of 4");
  refused(with(good, kTokensAt, 3, 8), good.size() - 8, "document 1 ends at token 4, but begins at 3 of 3");
  put(ends, good.size() - 16, 1, 8);
  put(ends, good.size() - 8, 2, 8);
  refused(ends, good.size() - 8, "the last document ends at token 2 of 4");
}

TEST(TokenShard, VerifyNamesTheTokenOutsideOfTheVocabulary) {
  const TempFolder folder;
  auto bytes = shard_of({{1, 2, 3}, {4}});
  put(bytes, kTokenShardHeader + 4, 258, 2);
  write_text(folder / "s", bytes);
  expect_bad_content([&] { TokenShard(folder / "s").verify(); }, kTokenShardHeader,
                     "the token shard is corrupt: sha256");
  const auto sum = sha256(as_bytes(bytes).subspan(kTokenShardHeader));
  for (std::size_t i = 0; i < 32; ++i) {
    bytes = with(bytes, kSumAt + i, std::stoul(sum.substr(2 * i, 2), nullptr, 16), 1);
  }
  write_text(folder / "s", bytes);
  expect_bad_content([&] { TokenShard(folder / "s").verify(); }, kTokenShardHeader + 4,
                     "token 2 is 258, but the vocabulary has 258");
}

TEST(TokenShardWriter, RefusesWhatNoReaderWouldTake) {
  const TempFolder folder;
  {
    TokenShardWriter writer(folder / "s", tokenizer());
    expect_error([&] { writer.append(Ids{258}); }, "id", "got 258, expected 0 to 257");
    expect_error([&] { writer.append(Ids{-1}); }, "id", "got -1");
    expect_error([&] { writer.end_document(); }, "document", "without tokens");
    expect_error([&] { writer.commit(); }, "documents", "no document");
    writer.append(Ids{1});
    expect_error([&] { writer.commit(); }, "documents", "has not ended");
  }
  expect_error([&] { TokenShardWriter(folder / "s", {"t", "12", 3, -1, -1}); }, "fingerprint", "'12'");
  expect_error([&] { TokenShardWriter(folder / "s", {"t", std::string(64, 'x'), 3, -1, -1}); }, "fingerprint", "xx");
  expect_error([&] { TokenShardWriter(folder / "s", tokenizer(0)); }, "vocab_size", "got 0");
  EXPECT_EQ(folder.files(), 0U);
}

// Two shards and their index.
class TokenFolderTest : public testing::Test {
 protected:
  TokenFolderTest() {
    index_.tokenizer = tokenizer();
    index_.source = {{"made", "here"}};
    add("a", {{1, 2, 3}, {4}});
    add("b", {{5, 6}});
    write_token_index(folder_.path(), index_);
  }

  void add(const std::string& name, const std::vector<Ids>& documents) {
    const auto sum = write_shard(folder_ / name, documents);
    std::int64_t tokens = 0;
    for (const auto& document : documents) tokens += static_cast<std::int64_t>(document.size());
    index_.shards.push_back({name, tokens, static_cast<std::int64_t>(documents.size()), sum});
  }

  void expect_refused(const std::string& says) {
    write_token_index(folder_.path(), index_);
    test::expect_io_error([&] { TokenFolder{folder_.path()}; }, IoError::Kind::content, -1, says);
  }

  // The index with a part of its text replaced.
  void expect_text_refused(const std::string& part, const std::string& by, const std::string& says) {
    auto text = read_text(folder_ / kTokenIndexFile);
    const auto at = text.find(part);
    ASSERT_NE(at, std::string::npos) << part;
    write_text(folder_ / kTokenIndexFile, text.replace(at, part.size(), by));
    test::expect_io_error([&] { TokenFolder{folder_.path()}; }, IoError::Kind::content, -1, "index.json: " + says);
    write_token_index(folder_.path(), index_);
  }

  TempFolder folder_;
  TokenIndex index_;
};

TEST_F(TokenFolderTest, IsOneRowOfTokens) {
  const TokenFolder tokens(folder_.path());
  EXPECT_EQ(tokens.tokens(), 6);
  EXPECT_EQ(tokens.documents(), 3);
  EXPECT_EQ(tokens.tokenizer(), tokenizer());
  for (std::int64_t begin = 0; begin <= 6; ++begin) {
    for (std::int64_t end = begin + 1; end <= 6; ++end) {
      std::vector<std::int64_t> ids(static_cast<std::size_t>(end - begin)), expected(ids.size());
      tokens.read(begin, ids);
      std::iota(expected.begin(), expected.end(), begin + 1);
      EXPECT_EQ(ids, expected);
    }
  }
  const std::vector<std::int64_t> ends{3, 3, 3, 4, 6, 6};
  for (std::size_t i = 0; i < ends.size(); ++i) EXPECT_EQ(tokens.document_end(static_cast<std::int64_t>(i)), ends[i]);
  EXPECT_NO_THROW(tokens.verify());
}

TEST_F(TokenFolderTest, TheIndexComesBack) {
  index_.unfinished = {2, 5};
  write_token_index(folder_.path(), index_);
  const auto back = read_token_index(folder_.path());
  EXPECT_EQ(back.tokenizer, index_.tokenizer);
  EXPECT_EQ(back.source, index_.source);
  EXPECT_EQ(back.shards.size(), 2U);
  EXPECT_EQ(back.shards[1].sha256, index_.shards[1].sha256);
  EXPECT_EQ(back.unfinished->input, 2);
  EXPECT_EQ(back.unfinished->document, 5);
  expect_refused("its tokenization has not ended");
}

TEST_F(TokenFolderTest, RefusesShardsOfAnotherIndex) {
  std::swap(index_.shards[0].file, index_.shards[1].file);
  expect_refused("is not the shard that index.json describes");
  std::swap(index_.shards[0].file, index_.shards[1].file);
  index_.shards[0].sha256 = index_.shards[1].sha256;
  expect_refused("is not the shard that index.json describes");
  index_.shards.clear();
  expect_refused("holds no token shards");
  add("a", {{1}});
  index_.tokenizer.fingerprint = sha256(as_bytes("u"));
  expect_refused("was made with another tokenizer");
}

TEST_F(TokenFolderTest, RefusesAnIndexOfAnotherForm) {
  expect_text_refused("efla token shards", "parquet", "format: got \"parquet\", expected \"efla token shards\"");
  expect_text_refused("\"version\": 1", "\"version\": 2", "version: got 2, expected 1");
  expect_text_refused("\"vocab_size\": 258", "\"vocab_size\": 0", "tokenizer.vocab_size: got 0");
  expect_text_refused("\"eos\": 257", "\"eos\": 258", "tokenizer.eos: got 258, expected a whole number from -1 to 257");
  expect_text_refused("\"tokens\": 6", "\"tokens\": 7", "tokens: got 7, expected 6");
  expect_text_refused("\"documents\": 3", "\"documents\": \"3\"", "documents: got \"3\", expected 3");
  expect_text_refused("\"file\": \"a\"", "\"file\": \"../a\"", "shards[0].file: got \"../a\", expected a plain name");
  expect_text_refused("\"file\": \"a\"", "\"file\": 1", "shards[0].file: got 1, expected a text");
  expect_text_refused("\"documents\": 2", "\"documents\": 5",
                      "shards[0].documents: got 5, expected a whole number from 1 to 4");
  expect_text_refused(index_.shards[0].sha256, "12", "shards[0].sha256: got \"12\", expected 64 hexadecimal digits");
  expect_text_refused("\"shards\"", "\"sherds\"", "shards: got nothing, expected a list of objects");
  expect_text_refused("\"unfinished\": null", "\"unfinished\": 1", "unfinished: got 1, expected an object");
}

TEST_F(TokenFolderTest, NamesAMissingShardAndAMissingIndex) {
  std::filesystem::remove(folder_ / "b");
  test::expect_io_error([&] { TokenFolder{folder_.path()}; }, IoError::Kind::missing, -1, "/b: cannot open it");
  test::expect_io_error([&] { TokenFolder{folder_ / "none"}; }, IoError::Kind::missing, -1, "none/index.json");
}

}  // namespace
}  // namespace efla::io
