// Text to a folder of token shards.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/documents.h"
#include "efla/data/tokenizer.h"
#include "efla/io/token_folder.h"

namespace efla::data {

struct TokenizeOptions {
  std::vector<std::string> inputs;  // files and folders
  DocumentFormat format;
  bool bos = false;                                   // before each document; eos is always put behind it
  std::int64_t shard_tokens = std::int64_t{1} << 24;  // a shard ends with the document that reaches it
};

struct TokenizeProgress {
  std::uint64_t read = 0, size = 0;        // bytes of the input files, as they are on the disk
  std::uint64_t text = 0;                  // bytes of text that were tokenized by this call
  std::int64_t tokens = 0, documents = 0;  // by this call
};

struct TokenizeEvents {
  std::function<void(const TokenizeProgress&)> progress;  // after every few megabytes of text
  std::function<bool()> stop;                             // asked as often
};

enum class TokenizeEnd { complete, was_complete, stopped };

// Tokenizes the documents of the inputs, in order, with the pool's threads; the same bytes for any number of them. A
// shard appears whole or not at all; after a stop or the end of the process, the same call goes on behind the last
// whole shard and ends with the same bytes as one that was never interrupted. Memory: a few megabytes of text a thread,
// and what DocumentReader needs. Throws Error for options that do not fit, for inputs without text, and where the
// folder holds anything but what the same options began; IoError as DocumentReader does.
TokenizeEnd tokenize(const std::filesystem::path& folder, const TokenizeOptions& options, const Tokenizer& tokenizer,
                     ThreadPool& pool, const TokenizeEvents& events = {});

}  // namespace efla::data
