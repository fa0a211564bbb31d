#include "efla/io/tokens/token_folder.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::io {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "efla token shards";
constexpr int kVersion = 1;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 50;  // keeps sums of counts far from overflow

std::string read_sum(const Fields& fields, const char* name) {
  auto sum = fields.get<std::string>(name);
  const bool good = sum.size() == 64 && sum.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!good) fields.refuse(name, "64 hexadecimal digits in lower case");
  return sum;
}

TokenizerInfo read_tokenizer(const Fields& fields) {
  TokenizerInfo info;
  info.name = fields.get<std::string>("name");
  info.fingerprint = read_sum(fields, "sha256");
  info.vocab_size = fields.get<std::int64_t>("vocab_size", 1, INT32_MAX);
  info.bos = static_cast<std::int32_t>(fields.get<std::int64_t>("bos", -1, info.vocab_size - 1));
  info.eos = static_cast<std::int32_t>(fields.get<std::int64_t>("eos", -1, info.vocab_size - 1));
  return info;
}

TokenIndex::Shard read_shard(const Fields& fields) {
  TokenIndex::Shard shard;
  shard.file = fields.get<std::string>("file");
  // A plain name: an index from elsewhere must not open files outside of its folder.
  const bool plain = !shard.file.empty() && shard.file.front() != '.' &&
                     shard.file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
  if (!plain) fields.refuse("file", "a plain name");
  shard.tokens = fields.get<std::int64_t>("tokens", 1, kMaxCount);
  shard.documents = fields.get<std::int64_t>("documents", 1, shard.tokens);
  shard.sha256 = read_sum(fields, "sha256");
  return shard;
}

}  // namespace

std::int64_t TokenIndex::tokens() const {
  return std::accumulate(shards.begin(), shards.end(), std::int64_t{0},
                         [](auto sum, const auto& shard) { return sum + shard.tokens; });
}

std::int64_t TokenIndex::documents() const {
  return std::accumulate(shards.begin(), shards.end(), std::int64_t{0},
                         [](auto sum, const auto& shard) { return sum + shard.documents; });
}

TokenIndex read_token_index(const std::filesystem::path& folder) {
  const auto path = folder / kTokenIndexFile;
  const auto value = read_json(path);
  const Fields fields(value, refuse_in_file(path.string()));
  if (fields.get<std::string>("format") != kFormat) fields.refuse("format", shown(kFormat));
  fields.get<std::int64_t>("version", kVersion, kVersion);
  TokenIndex index;
  index.tokenizer = read_tokenizer(fields.object("tokenizer"));
  std::int64_t tokens = 0;
  for (const auto& shard : fields.objects("shards")) {
    if (tokens > kMaxCount) fields.refuse("shards", "fewer tokens");
    tokens += index.shards.emplace_back(read_shard(shard)).tokens;
  }
  fields.get<std::int64_t>("tokens", index.tokens(), index.tokens());
  fields.get<std::int64_t>("documents", index.documents(), index.documents());
  if (const auto* source = fields.find("source")) index.source = *source;
  if (!fields.content().contains("unfinished")) fields.refuse("unfinished", "null, or where tokenizing resumes");
  if (fields.find("unfinished") != nullptr) {
    const auto position = fields.object("unfinished");
    index.unfinished = {position.get<std::int64_t>("input", 0, kMaxCount),
                        position.get<std::int64_t>("document", 0, kMaxCount)};
  }
  return index;
}

void write_token_index(const std::filesystem::path& folder, const TokenIndex& index) {
  const auto& t = index.tokenizer;
  ordered_json value{
      {"format", kFormat},
      {"version", kVersion},
      {"tokenizer",
       {{"name", t.name}, {"sha256", t.fingerprint}, {"vocab_size", t.vocab_size}, {"bos", t.bos}, {"eos", t.eos}}},
      {"tokens", index.tokens()},
      {"documents", index.documents()},
      {"shards", ordered_json::array()},
      {"source", index.source},
      {"unfinished", nullptr}};
  if (index.unfinished) {
    value["unfinished"] = {{"input", index.unfinished->input}, {"document", index.unfinished->document}};
  }
  for (const auto& shard : index.shards) {
    value["shards"].push_back(
        {{"file", shard.file}, {"tokens", shard.tokens}, {"documents", shard.documents}, {"sha256", shard.sha256}});
  }
  write_file_atomically(folder / kTokenIndexFile, to_json_text(value));
}

TokenFolder::TokenFolder(const std::filesystem::path& folder) : index_(read_token_index(folder)) {
  if (index_.unfinished) fail_in(folder, "its tokenization has not ended: run the same command again");
  if (index_.shards.empty()) fail_in(folder, "holds no token shards");
  begins_.push_back(0);
  for (const auto& expected : index_.shards) {
    const auto& shard = shards_.emplace_back(folder / expected.file);
    const auto& got = shard.content();
    if (got.tokens != expected.tokens || got.documents != expected.documents || got.sha256 != expected.sha256) {
      fail_in(shard.path(), "is not the shard that index.json describes: tokens, documents or sha256 differ");
    }
    if (got.fingerprint != tokenizer().fingerprint || got.vocab_size != tokenizer().vocab_size) {
      fail_in(shard.path(), "was made with another tokenizer than index.json says");
    }
    begins_.push_back(begins_.back() + got.tokens);
  }
}

std::size_t TokenFolder::shard_of(std::int64_t token) const {
  return static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), token) - begins_.begin()) - 1;
}

std::int64_t TokenFolder::document_end(std::int64_t token) const {
  const auto s = shard_of(token);
  const auto& shard = shards_[s];
  return begins_[s] + shard.document_end(shard.document_of(token - begins_[s]));
}

void TokenFolder::read(std::int64_t begin, std::span<std::int64_t> out) const {
  for (auto s = shard_of(begin); !out.empty(); ++s) {
    const auto here = std::min(out.size(), static_cast<std::size_t>(begins_[s + 1] - begin));
    shards_[s].read(begin - begins_[s], out.first(here));
    out = out.subspan(here);
    begin += static_cast<std::int64_t>(here);
  }
}

void TokenFolder::verify() const {
  for (const auto& shard : shards_) shard.verify();
}

}  // namespace efla::io
