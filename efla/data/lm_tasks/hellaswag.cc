// HellaSwag: how the description of a scene continues.
#include <fmt/format.h>

#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {
namespace {

constexpr std::size_t kEndings = 4;

// Removes the marks of WikiHow's articles: "[title]" starts a sentence, all others are deleted.
std::string without_marks(std::string_view text) {
  auto rest = replace_all(strip(text), " [title]", ". ");
  std::string result;
  for (std::size_t at = 0; at < rest.size();) {
    const auto close = rest[at] == '[' ? rest.find_first_of("]\n", at) : std::string::npos;
    if (close != std::string::npos && rest[close] == ']') {
      at = close + 1;
    } else {
      result += rest[at++];
    }
  }
  return replace_all(result, "  ", " ");
}

// Capitalizes ctx_b, the unfinished sentence at the end of an ActivityNet context, as the harness does. In a joined
// context it is the text after the last ". ", unless the text itself ends with a full stop, as WikiHow's texts do.
std::string with_begun_sentence(const std::string& context) {
  const auto stop = context.rfind(". ");
  if (stop == std::string::npos || context.ends_with('.')) return context;
  return context.substr(0, stop + 2) + capitalize(context.substr(stop + 2));
}

}  // namespace

MultipleChoice hellaswag_example(const io::Fields& record) {
  const auto activity = text_of(record, "activity_label") + ": ";
  auto endings = texts_of(record, "endings");
  if (endings.size() != kEndings) {
    record.refuse("endings", fmt::format("{} texts", kEndings));
  }
  const auto* found = record.find("label");
  const auto label = found != nullptr && found->is_string()
                         ? place_of(record, "label", found->get<std::string>(), {"0", "1", "2", "3"})
                         : static_cast<std::size_t>(record.get<std::int64_t>("label", 0, kEndings - 1));
  const auto context = record.find("ctx_a") != nullptr
                           ? record.get<std::string>("ctx_a") + " " + capitalize(record.get<std::string>("ctx_b"))
                           : with_begun_sentence(text_of(record, "ctx"));
  for (auto& ending : endings) {
    ending = without_marks(ending);
    if (ending.empty()) record.refuse("endings", "texts with more than marks");
  }
  return choose_answer(without_marks(activity + context), endings, label);
}

}  // namespace efla::data
