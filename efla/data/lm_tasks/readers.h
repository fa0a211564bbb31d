// One function per task family, which reads an example from a record, or all from the task's text. A comment lists the
// fields of the record.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "efla/data/lm_tasks/task.h"
#include "efla/data/lm_tasks/task_file.h"

namespace efla::data {

// Returns a question followed by each answer, with a space before the answer.
MultipleChoice choose_answer(const std::string& context, const std::vector<std::string>& answers, std::size_t gold);

// {goal, sol1, sol2}; another file says whether the second solution is right.
MultipleChoice piqa_example(const io::Fields& record, bool second);

// {activity_label, ctx_a, ctx_b, endings[4], label} as published by the authors, or {activity_label, ctx, endings[4],
// label} from which the marks in brackets were removed already. label is a number, or its text as in Hugging Face's
// copy.
MultipleChoice hellaswag_example(const io::Fields& record);

// {sentence, option1, option2, answer}: the text after the blank "_" is scored after each option.
MultipleChoice winogrande_example(const io::Fields& record);

// {question, choices {text[], label[]}, answerKey}
MultipleChoice arc_example(const io::Fields& record);

// {question, title, passage, answer}
MultipleChoice boolq_example(const io::Fields& record);

// {question {stem, choices [{text, label}]}, answerKey}
MultipleChoice openbookqa_example(const io::Fields& record);

// {support, question, distractor1, distractor2, distractor3, correct_answer}
MultipleChoice sciq_example(const io::Fields& record);

// {text}: its last word, after a space, is the continuation.
Cloze lambada_example(const io::Fields& record);

// Returns WikiText's articles, each of which starts with a line " = Title = ".
std::vector<Document> wikitext_documents(std::string_view text);

// Converts WikiText's tokens to running text by the harness's rules.
std::string detokenize_wikitext(std::string_view text);

}  // namespace efla::data
