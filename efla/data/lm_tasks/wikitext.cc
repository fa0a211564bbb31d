// WikiText: whole articles, scored token by token. Articles are found and detokenized as in the harness's task
// "wikitext" and in its data set, EleutherAI/wikitext_document_level.
#include <array>
#include <utility>

#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {
namespace {

using Replacement = std::pair<std::string_view, std::string_view>;

// Returns whether a line is " = Title = ", and not " = = Section = = " or a deeper heading.
bool is_title(std::string_view line) {
  const auto joined = replace_all(replace_all(line, "= = =", "==="), "= =", "==");
  const auto heading = strip(joined);
  return heading.starts_with("= ") && heading.ends_with(" =");
}

std::string replace_in_order(std::string text, const auto& replacements) {
  for (const auto& [from, to] : replacements) text = replace_all(text, from, to);
  return text;
}

// Removes the white space after every `open` and before the next `close`.
std::string tighten(std::string_view text, char open, char close) {
  std::string result;
  for (;;) {
    const auto begin = text.find(open);
    const auto end = begin == std::string_view::npos ? begin : text.find(close, begin + 1);
    if (end == std::string_view::npos) return result.append(text);
    result.append(text.substr(0, begin + 1)).append(strip(text.substr(begin + 1, end - begin - 1))) += close;
    text.remove_prefix(end + 1);
  }
}

std::int64_t count_unknown(std::string_view text) {
  constexpr std::string_view kUnknown = " <unk> ";
  std::int64_t count = 0;
  // Neighbouring occurrences share a space.
  for (auto at = text.find(kUnknown); at != std::string_view::npos; at = text.find(kUnknown, at + 1)) ++count;
  return count;
}

}  // namespace

// Applies the rules of the harness in its order. One rule, for "/' 5/", is left out: it was meant as a regular
// expression for quoted numbers, but matches only a literal text, and replaces that by "[0-9]".
std::string detokenize_wikitext(std::string_view text) {
  constexpr std::array<Replacement, 10> kBefore{{{"s '", "s'"},
                                                 {" @-@ ", "-"},
                                                 {" @,@ ", ","},
                                                 {" @.@ ", "."},
                                                 {" : ", ": "},
                                                 {" ; ", "; "},
                                                 {" . ", ". "},
                                                 {" ! ", "! "},
                                                 {" ? ", "? "},
                                                 {" , ", ", "}}};
  constexpr std::array<Replacement, 8> kAfter{{{"= = = =", "===="},
                                               {"= = =", "==="},
                                               {"= =", "=="},
                                               {" ° ", "°"},
                                               {" \n", "\n"},
                                               {"\n ", "\n"},
                                               {" N ", " 1 "},
                                               {" 's", "'s"}}};
  auto result = replace_in_order(std::string(text), kBefore);
  for (const auto& [open, close] : {std::pair{'(', ')'}, {'[', ']'}, {'{', '}'}, {'"', '"'}, {'\'', '\''}}) {
    result = tighten(result, open, close);
  }
  return replace_in_order(std::move(result), kAfter);
}

std::vector<Document> wikitext_documents(std::string_view text) {
  std::vector<Document> documents;
  const auto add = [&](std::string_view page) {
    documents.push_back(
        {detokenize_wikitext(page), count_words(page), static_cast<std::int64_t>(page.size()), count_unknown(page)});
  };
  std::size_t page = 0;
  for (std::size_t line = 0; line < text.size();) {
    const auto end = std::min(text.find('\n', line), text.size());
    if (is_title(text.substr(line, end - line)) && line > page) {
      const auto before = text.substr(page, line - 1 - page);  // the newline at its end belongs to neither article
      if (!strip(before).empty()) add(before);
      page = line;
    }
    line = end + 1;
  }
  if (page < text.size()) add(text.substr(page));
  return documents;
}

}  // namespace efla::data
