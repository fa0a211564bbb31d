// SciQ: crowd-sourced science questions after a passage that may be empty.
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {

MultipleChoice sciq_example(const io::Fields& record) {
  const auto support = record.get<std::string>("support");
  const auto context = std::string(lstrip(support)) + "\nQuestion: " + text_of(record, "question") + "\nAnswer:";
  return choose_answer(context,
                       {text_of(record, "distractor1"), text_of(record, "distractor2"), text_of(record, "distractor3"),
                        text_of(record, "correct_answer")},
                       3);
}

}  // namespace efla::data
