#include <string_view>
#include <utility>

#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

GrammarSource choice_grammar(const std::vector<std::string>& texts) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string rule = "root ::= ";
  for (const auto& text : texts) {
    rule += &text == texts.data() ? "\"" : " | \"";
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      constexpr unsigned char kSpace = 0x20, kDelete = 0x7F;
      if (c == '"' || c == '\\') {
        rule += {'\\', c};
      } else if (byte < kSpace || byte == kDelete) {
        rule += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
      } else {
        rule += c;
      }
    }
    rule += '"';
  }
  return {.kind = GrammarSource::Kind::ebnf, .text = std::move(rule)};
}

}  // namespace efla::serve
