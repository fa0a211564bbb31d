// A tokenizer of bytes with special tokens, for tests that have no real one.
#pragma once

#include <cstdint>
#include <memory>

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/temp_folder.h"

namespace efla::test {

inline constexpr std::int32_t kTextEnd = 256, kTurnStart = 257, kTurnEnd = 258;

// Returns the tokenizer whose ids 0 to 255 are the bytes, and whose special tokens are those of ChatML. The eos is
// <|endoftext|>; there is no bos.
inline std::unique_ptr<data::Tokenizer> tokenizer_with_special_tokens() {
  const TempFolder folder;
  auto document = data::tokenizer_json("bytes").tokenizer;
  auto added = nlohmann::json::array();
  for (const char* text : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    added.push_back({{"id", kTextEnd + added.size()}, {"content", text}, {"normalized", false}, {"special", true}});
  }
  document["added_tokens"] = added;
  write_text(folder / "tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  return data::load_tokenizer(write_text(folder / "tokenizer.json", document.dump()));
}

}  // namespace efla::test
