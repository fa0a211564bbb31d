// ARC, easy and challenge: school science with three to five answers.
#include <fmt/format.h>

#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice arc_example(const io::Fields& record) {
  const auto choices = record.object("choices");
  const auto answers = texts_of(choices, "text");
  const auto labels = texts_of(choices, "label");
  if (labels.size() != answers.size()) {
    choices.refuse("label", fmt::format("{} texts as there are answers", answers.size()));
  }
  // Labels are letters in some rows and digits in others.
  const auto gold = place_of(record, "answerKey", text_of(record, "answerKey"), labels);
  return choose_answer("Question: " + text_of(record, "question") + "\nAnswer:", answers, gold);
}

}  // namespace efla::data
