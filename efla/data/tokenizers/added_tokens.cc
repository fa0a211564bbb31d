#include "efla/data/tokenizers/added_tokens.h"

#include <algorithm>
#include <unordered_map>

#include <fmt/format.h>

#include "efla/data/tokenizers/stages.h"

namespace efla::data {

AddedToken read_added_token(const io::Fields& token, const std::string& path) {
  const auto text = token.get<std::string>("content");
  const auto has = [&](const char* flag) { return token.find<bool>(flag).value_or(false); };
  for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
    if (has(flag)) refuse_tokenizer(path, fmt::format("{} of the added token {}", flag, io::brief(text)));
  }
  if (text.empty()) token.refuse("content", "a text that is not empty");
  return {-1, text, has("special"), token.find<bool>("normalized").value_or(!has("special"))};
}

std::vector<AddedToken> read_added_tokens(const io::Fields& document, const std::string& path) {
  std::vector<AddedToken> tokens;
  if (document.find("added_tokens") == nullptr) return tokens;
  for (const auto& token : document.objects("added_tokens")) {
    token.get<std::int64_t>("id", 0, INT32_MAX);  // tokenizers does not use it, but wants it
    tokens.push_back(read_added_token(token, path));
  }
  return tokens;
}

std::vector<AddedToken> number_added_tokens(const std::vector<AddedToken>& given, const nlohmann::json& vocabulary) {
  std::vector<AddedToken> tokens;
  std::unordered_map<std::string, std::size_t> places;  // in tokens, by the text
  auto next = static_cast<std::int32_t>(vocabulary.size());
  for (AddedToken token : given) {
    const auto [place, is_new] = places.try_emplace(token.text, tokens.size());
    if (is_new) {
      const auto known = vocabulary.find(token.text);
      token.id = known == vocabulary.end() ? next++ : known->get<std::int32_t>();
      tokens.push_back(token);
    } else {
      AddedToken& before = tokens[place->second];
      before = {before.id, token.text, token.special || before.special, token.normalized};
    }
  }
  return tokens;
}

void AddedTokens::add(const AddedToken& token) {
  auto& same = by_first_[static_cast<std::uint8_t>(token.text.front())];
  const auto place = std::find_if(same.begin(), same.end(),
                                  [&](const AddedToken& other) { return other.text.size() < token.text.size(); });
  same.insert(place, token);
  longest_ = std::max(longest_, token.text.size());
}

bool AddedTokens::touches(std::string_view text, std::size_t place) const {
  for (std::size_t from = place - std::min(place, longest_); from < place; ++from) {
    const auto rest = text.substr(from);
    for (const auto& token : by_first_[static_cast<std::uint8_t>(rest.front())]) {
      const auto size = std::min(token.text.size(), rest.size());
      if (size >= place - from && rest.substr(0, size) == std::string_view(token.text).substr(0, size)) return true;
    }
  }
  return false;
}

const AddedToken* AddedTokens::at_start_of(std::string_view text, Which found) const {
  for (const auto& token : by_first_[static_cast<std::uint8_t>(text.front())]) {
    if (found == Which::not_special && token.special) continue;
    if (text.starts_with(token.text)) return &token;
  }
  return nullptr;
}

}  // namespace efla::data
