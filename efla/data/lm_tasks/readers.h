// One function a task family: an example of a record, or of the task's whole text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "efla/data/lm_tasks/record.h"
#include "efla/data/lm_tasks/task.h"

namespace efla::data {

// The question followed by each answer, a space before it.
MultipleChoice choose_answer(const std::string& context, const std::vector<std::string>& answers, std::size_t gold);

// {goal, sol1, sol2}; whether the second is right is in another file.
MultipleChoice piqa_example(const Record& record, bool second);

// {activity_label, ctx_a, ctx_b, endings[4], label} of the data set's authors, or {activity_label, ctx, endings[4],
// label} with the marks in brackets taken out already.
MultipleChoice hellaswag_example(const Record& record);

// {sentence, option1, option2, answer}: what follows the blank "_" is scored behind either option.
MultipleChoice winogrande_example(const Record& record);

// {question, choices {text[], label[]}, answerKey}
MultipleChoice arc_example(const Record& record);

// {question, title, passage, answer}
MultipleChoice boolq_example(const Record& record);

// {question {stem, choices [{text, label}]}, answerKey}
MultipleChoice openbookqa_example(const Record& record);

// {support, question, distractor1, distractor2, distractor3, correct_answer}
MultipleChoice sciq_example(const Record& record);

// {text}: its last word, after a space, is the continuation.
Cloze lambada_example(const Record& record);

// WikiText's articles, each begun by a line " = Title = ".
std::vector<Document> wikitext_documents(std::string_view text);

// WikiText's tokens as running text, by the harness's rules.
std::string detokenize_wikitext(std::string_view text);

}  // namespace efla::data
