// OpenBookQA: elementary science, without the book.
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {

MultipleChoice openbookqa_example(const Record& record) {
  const auto question = record.object("question");
  std::vector<std::string> answers, labels;
  for (const auto& choice : question.objects("choices")) {
    answers.push_back(choice.text("text"));
    labels.push_back(choice.text("label"));
  }
  const auto gold = record.place(std::string(lstrip(record.text("answerKey"))), labels, "answerKey");
  return choose_answer(question.text("stem"), answers, gold);
}

}  // namespace efla::data
