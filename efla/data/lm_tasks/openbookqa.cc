// OpenBookQA: elementary science, without the book.
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {

MultipleChoice openbookqa_example(const io::Fields& record) {
  const auto question = record.object("question");
  std::vector<std::string> answers, labels;
  for (const auto& choice : question.objects("choices")) {
    answers.push_back(text_of(choice, "text"));
    labels.push_back(text_of(choice, "label"));
  }
  if (answers.empty()) question.refuse("choices", "a list that is not empty");
  const auto gold = place_of(record, "answerKey", std::string(lstrip(text_of(record, "answerKey"))), labels);
  return choose_answer(text_of(question, "stem"), answers, gold);
}

}  // namespace efla::data
