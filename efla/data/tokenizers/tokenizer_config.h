// What the files beside a tokenizer's file say about it, as transformers reads them.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/added_tokens.h"

namespace efla::data {

// The files that belong to a tokenizer.json or a SentencePiece model in the same folder. The last two were written by
// older versions of transformers, and count only if tokenizer_config.json has no added_tokens_decoder.
inline constexpr const char* kTokenizerConfigFile = "tokenizer_config.json";
inline constexpr const char* kSpecialTokensFile = "special_tokens_map.json";
inline constexpr const char* kAddedTokensFile = "added_tokens.json";
inline constexpr std::array<const char*, 3> kFilesBesideTokenizer{kTokenizerConfigFile, kSpecialTokensFile,
                                                                  kAddedTokensFile};

struct TokenizerConfig {
  // A token that a file names by its text.
  struct Name {
    std::string field, text, file;
  };

  std::vector<AddedToken> added;  // in the order of the ids that the files give them
  bool overrides = false;         // whether `added` goes before what a tokenizer.json says about the same text
  std::vector<Name> names;        // bos_token, eos_token and other special tokens
  bool legacy = false;            // SentencePiece: text behind an added token begins with an added space too

  // Returns the text of bos_token or eos_token; "": it has none.
  std::string_view text_of(std::string_view field) const;
  // Throws IoError(content): no file has the token that `field` names. where: the file that was searched first.
  [[noreturn]] void refuse(std::string_view field, const std::string& where) const;
};

// Reads the files beside the tokenizer at `path`. Each may be missing. A GGUF file says it itself. Throws
// IoError(content) for what is not supported.
TokenizerConfig read_tokenizer_config(const std::string& path);

}  // namespace efla::data
