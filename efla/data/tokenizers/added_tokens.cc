#include "efla/data/tokenizers/added_tokens.h"

#include <algorithm>

#include <fmt/format.h>

#include "efla/data/tokenizers/stages.h"

namespace efla::data {

std::vector<AddedToken> read_added_tokens(const io::Fields& document, const std::string& path) {
  std::vector<AddedToken> tokens;
  if (document.find("added_tokens") == nullptr) return tokens;
  for (const auto& token : document.objects("added_tokens")) {
    const auto text = token.get<std::string>("content");
    const auto has = [&](const char* flag) { return token.find<bool>(flag).value_or(false); };
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (has(flag)) refuse_tokenizer(path, fmt::format("{} of the added token {}", flag, io::brief(text)));
    }
    if (text.empty()) token.refuse("content", "a text that is not empty");
    const bool normalized = token.find<bool>("normalized").value_or(!has("special"));
    const auto id = static_cast<std::int32_t>(token.get<std::int64_t>("id", 0, INT32_MAX));
    tokens.push_back({id, text, has("special"), normalized});
  }
  return tokens;
}

void AddedTokens::add(const AddedToken& token) {
  auto& same = by_first_[static_cast<std::uint8_t>(token.text.front())];
  const auto place = std::find_if(same.begin(), same.end(),
                                  [&](const AddedToken& other) { return other.text.size() < token.text.size(); });
  same.insert(place, token);
}

const AddedToken* AddedTokens::at_start_of(std::string_view text) const {
  for (const auto& token : by_first_[static_cast<std::uint8_t>(text.front())]) {
    if (text.starts_with(token.text)) return &token;
  }
  return nullptr;
}

}  // namespace efla::data
