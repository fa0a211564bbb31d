#include "efla/engine/reply_text.h"

#include <algorithm>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/utf8.h"

namespace efla::engine {
namespace {

using Symbols = ReplyText::Symbols;

constexpr char32_t kSpecial = 256;  // kSpecial + id is the symbol of a special token

Symbols symbols_of_bytes(std::string_view bytes) {
  Symbols symbols;
  for (const char c : bytes) symbols += static_cast<unsigned char>(c);
  return symbols;
}

// Returns a string's symbols, with one symbol in place of each text of a special token. The leftmost text is replaced
// first, and of several that begin at one place the longest.
Symbols symbols_with_specials(const data::Tokenizer& tokenizer, std::string_view string) {
  std::vector<std::pair<std::int32_t, std::string_view>> specials;  // in the string
  for (const auto& [id, text] : tokenizer.special_texts()) {
    if (string.find(text) != std::string_view::npos) specials.emplace_back(id, text);
  }
  Symbols symbols;
  for (std::size_t at = 0; at < string.size();) {
    const auto rest = string.substr(at);
    std::size_t size = 0;
    char32_t symbol = static_cast<unsigned char>(rest.front());
    for (const auto& [id, text] : specials) {
      if (text.size() <= size || !rest.starts_with(text)) continue;
      size = text.size();
      symbol = kSpecial + static_cast<char32_t>(id);
    }
    symbols += symbol;
    at += std::max<std::size_t>(size, 1);
  }
  return symbols;
}

}  // namespace

void require_stop_strings(const std::string& operation, const std::vector<std::string>& strings) {
  for (const auto& string : strings) {
    if (!string.empty() && utf8_prefix(string) == string.size()) continue;
    throw Error(operation, "stop", string.empty() ? "an empty text" : "a text that is not UTF-8",
                "UTF-8 that ends the reply");
  }
}

// Computes the lengths of the shorter matches as Knuth, Morris and Pratt do ("Fast pattern matching in strings", 1977).
ReplyText::Stop::Stop(std::string text, Symbols all) : string(std::move(text)), symbols(std::move(all)) {
  shorter.assign(symbols.size(), 0);
  for (std::size_t i = 1, length = 0; i < symbols.size(); ++i) {
    while (length > 0 && symbols[i] != symbols[length]) length = shorter[length - 1];
    if (symbols[i] == symbols[length]) ++length;
    shorter[i] = length;
  }
}

bool ReplyText::Stop::push(char32_t symbol) {
  if (symbol >= kSpecial && !has(symbol)) return false;
  while (matched > 0 && symbols[matched] != symbol) matched = shorter[matched - 1];
  if (symbols[matched] == symbol) ++matched;
  return matched == symbols.size();
}

std::size_t ReplyText::Stop::text_size(std::size_t count) const {
  return static_cast<std::size_t>(std::count_if(symbols.begin(), symbols.begin() + static_cast<std::ptrdiff_t>(count),
                                                [](char32_t symbol) { return symbol < kSpecial; }));
}

ReplyText::ReplyText(const data::Tokenizer& tokenizer, const std::vector<std::string>& strings, std::string held,
                     std::span<const std::int32_t> last_ids)
    : tokenizer_(tokenizer), decoder_(tokenizer), resumed_(std::move(held)) {
  for (const auto& string : strings) {
    auto bytes = symbols_of_bytes(string), symbols = symbols_with_specials(tokenizer, string);
    if (symbols != bytes) stops_.emplace_back(string, std::move(symbols));
    stops_.emplace_back(string, std::move(bytes));  // a reply may also spell the special token
  }
  for (const auto id : last_ids) decoder_.push(id);
}

std::string ReplyText::push(std::int32_t id) {
  if (stopped()) return {};
  add(std::exchange(resumed_, {}) + decoder_.push(id));
  if (tokenizer_.special_texts().contains(id)) add_symbol(kSpecial + static_cast<char32_t>(id));
  return take();
}

std::string ReplyText::finish() {
  if (stopped()) return {};
  add(std::exchange(resumed_, {}) + decoder_.finish());
  for (auto& stop : stops_) stop.matched = 0;
  return take();
}

void ReplyText::add(std::string_view text) {
  for (const char c : text) {
    if (stopped()) return;
    held_ += c;
    add_symbol(static_cast<unsigned char>(c));
  }
}

void ReplyText::add_symbol(char32_t symbol) {
  if (stopped()) return;
  std::size_t longest = 0;
  for (auto& stop : stops_) {
    if (!stop.push(symbol)) continue;
    const auto size = stop.text_size(stop.symbols.size());
    if (stopped() && size <= longest) continue;
    stop_ = &stop;
    longest = size;
  }
  if (!stopped()) return;
  // Before a stop of special tokens alone an unfinished character belongs to the text.
  if (longest == 0) held_ += decoder_.finish();
  held_.resize(held_.size() - longest);
}

// Returns the text that no stop string can begin in.
std::string ReplyText::take() {
  std::size_t kept = 0;
  for (const auto& stop : stops_) kept = stopped() ? 0 : std::max(kept, stop.text_size(stop.matched));
  std::string text = held_.substr(0, held_.size() - kept);
  held_.erase(0, text.size());
  return text;
}

Symbols ReplyText::symbols_for_stop(std::int32_t id) const {
  const char32_t special = kSpecial + static_cast<char32_t>(id);
  return stop_->has(special) ? Symbols(1, special) : symbols_of_bytes(tokenizer_.bytes_of(id));
}

std::size_t ReplyText::begun() const {
  std::size_t longest = 0;
  for (const auto& stop : stops_) longest = std::max(longest, stop.matched);
  return longest;
}

std::size_t ReplyText::symbols_of(std::int32_t id) const {
  return tokenizer_.special_texts().contains(id) ? 1 : tokenizer_.bytes_of(id).size();
}

}  // namespace efla::engine
