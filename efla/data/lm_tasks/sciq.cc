// SciQ: crowd-sourced science questions after a passage that may be empty.
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {

MultipleChoice sciq_example(const Record& record) {
  const auto support = record.text("support", true);
  const auto context = std::string(lstrip(support)) + "\nQuestion: " + record.text("question") + "\nAnswer:";
  return choose_answer(context,
                       {record.text("distractor1"), record.text("distractor2"), record.text("distractor3"),
                        record.text("correct_answer")},
                       3);
}

}  // namespace efla::data
