// Converts text to a folder of token shards.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/documents.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/tokens/token_folder.h"

namespace efla::data {

struct TokenizeOptions {
  std::vector<std::string> inputs;  // files and folders
  DocumentFormat format;
  bool bos = false;                                   // write bos before each document; eos always follows it
  std::int64_t shard_tokens = std::int64_t{1} << 24;  // a shard ends with the document that reaches this number
};

struct TokenizeProgress {
  std::uint64_t read = 0, size = 0;        // bytes of the input files on disk
  std::uint64_t text = 0;                  // bytes of text tokenized by this call
  std::int64_t tokens = 0, documents = 0;  // by this call
};

struct TokenizeEvents {
  std::function<void(const TokenizeProgress&)> progress;  // called after every few megabytes of text
  std::function<bool()> stop;                             // called as often; true: stop
};

enum class TokenizeEnd { complete, was_complete, stopped };

// Tokenizes the documents of the inputs, in order, with the threads of the pool. The bytes do not depend on the number
// of threads. A shard appears whole or not at all. After a stop or a crash the same call resumes after the last whole
// shard and ends with the same bytes as an uninterrupted call. Memory: a few megabytes of text per thread, and what
// DocumentReader needs. Throws Error for invalid options, for inputs without text, and if the folder holds anything but
// the result of the same options; throws IoError like DocumentReader.
TokenizeEnd tokenize(const std::filesystem::path& folder, const TokenizeOptions& options, const Tokenizer& tokenizer,
                     ThreadPool& pool, const TokenizeEvents& events = {});

}  // namespace efla::data
