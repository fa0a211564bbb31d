// LAMBADA: the last word of a passage.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

Cloze lambada_example(const Record& record) {
  const auto text = record.text("text");
  const auto space = text.rfind(' ');
  if (space == std::string::npos || space + 1 == text.size())
    record.fail("text", "has no word after a space at its end");
  return {text.substr(0, space), text.substr(space)};
}

}  // namespace efla::data
