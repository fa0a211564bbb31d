// ARC, easy and challenge: school science with three to five answers.
#include <fmt/format.h>

#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice arc_example(const Record& record) {
  const auto choices = record.object("choices");
  const auto answers = choices.texts("text");
  const auto labels = choices.texts("label");
  if (labels.size() != answers.size()) {
    choices.fail("label",
                 fmt::format("holds {} texts, expected {} as there are answers", labels.size(), answers.size()));
  }
  // Labels are letters in some rows and digits in others.
  const auto gold = record.place(record.text("answerKey"), labels, "answerKey");
  return choose_answer("Question: " + record.text("question") + "\nAnswer:", answers, gold);
}

}  // namespace efla::data
