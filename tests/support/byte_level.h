// Writes small files tokenizer.json of BPE over bytes, for tests that have no real one.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/tokenizer_json.h"

namespace efla::test {

inline nlohmann::json byte_level_step(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

inline nlohmann::json added_token(std::size_t id, const std::string& text, bool special, bool normalized) {
  return {{"id", id},        {"content", text},          {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", normalized}, {"special", special}};
}

// Returns the document of a tokenizer: ids 0 to 255 are the bytes, 256 to 271 what merges form, 272 is " whole" without
// a merge; 273 <|bos|> and 274 <|eos|> are special, 275 <think> and 276, three spaces, are not.
inline nlohmann::json byte_level_json(nlohmann::json pre_tokenizer) {
  nlohmann::json document = data::tokenizer_json("bytes").tokenizer;
  document["pre_tokenizer"] = std::move(pre_tokenizer);
  auto& model = document["model"];
  for (const auto& [left, right] :
       std::initializer_list<std::pair<std::string, std::string>>{{"t", "h"},
                                                                  {"th", "e"},
                                                                  {"Ġ", "the"},
                                                                  {"i", "n"},
                                                                  {"Ġ", "in"},
                                                                  {"1", "2"},
                                                                  {"12", "3"},
                                                                  {"Ġ", "Ġ"},
                                                                  {"Ã", "©"},  // the bytes of é
                                                                  {"l", "l"},
                                                                  {"'", "ll"},
                                                                  {"Ċ", "Ċ"},
                                                                  {"(", "the"},
                                                                  {"4", "5"},
                                                                  {"123", "45"},
                                                                  {"the", "Ġin"}}) {
    model["merges"].push_back({left, right});
    model["vocab"][left + right] = model["vocab"].size();
  }
  model["vocab"]["Ġwhole"] = model["vocab"].size();
  const std::size_t first = model["vocab"].size();
  document["added_tokens"] = {
      added_token(first, "<|bos|>", true, false), added_token(first + 1, "<|eos|>", true, false),
      added_token(first + 2, "<think>", false, false), added_token(first + 3, "   ", false, true)};
  return document;
}

}  // namespace efla::test
