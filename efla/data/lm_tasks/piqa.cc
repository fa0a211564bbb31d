// PIQA: which of two solutions reaches a goal.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice piqa_example(const Record& record, bool second) {
  return choose_answer("Question: " + record.text("goal") + "\nAnswer:", {record.text("sol1"), record.text("sol2")},
                       second ? 1 : 0);
}

}  // namespace efla::data
