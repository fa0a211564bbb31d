// PIQA: which of two solutions reaches a goal.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice piqa_example(const io::Fields& record, bool second) {
  return choose_answer("Question: " + text_of(record, "goal") + "\nAnswer:",
                       {text_of(record, "sol1"), text_of(record, "sol2")}, second ? 1 : 0);
}

}  // namespace efla::data
