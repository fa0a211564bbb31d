// LAMBADA: the last word of a passage.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

Cloze lambada_example(const io::Fields& record) {
  const auto text = text_of(record, "text");
  const auto space = text.rfind(' ');
  if (space == std::string::npos || space + 1 == text.size())
    record.refuse("text", "a text with a word after a space at its end");
  return {text.substr(0, space), text.substr(space)};
}

}  // namespace efla::data
