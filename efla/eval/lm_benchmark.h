// Evaluates a language model on the tasks of table 1 of the EFLA paper.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/lm_tasks/task.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/eval/benchmark_metrics.h"
#include "efla/eval/likelihood.h"

namespace efla::eval {

struct LmEvalOptions {
  TextOptions text;
  std::int64_t batch_tokens = 8192;
};

struct LmTaskResult {
  std::string task, file;
  std::int64_t examples = 0;
  std::vector<Score> scores;
  std::int64_t unknown_words = 0;  // words given as <unk>; with any, perplexities cannot be compared

  // Throws std::out_of_range for a name that is not there.
  const Score& score(std::string_view name) const;
};

// What a scorer gets of a task.
struct LmTaskRequests {
  std::vector<ScoreRequest> requests;
  std::vector<std::size_t> ends;  // of each document's requests; empty for tasks without documents
};

// Returns the requests of a task. Throws what continuation_request and document_requests throw.
LmTaskRequests lm_task_requests(const data::LmTask& task, const data::Tokenizer& tokenizer, const TextOptions& options,
                                ThreadPool& pool);

// Returns the scores of a task, whose requests are given. Throws what score throws.
LmTaskResult evaluate_lm_task(const data::LmTask& task, const LmTaskRequests& requests, const Scorer& scorer,
                              std::int64_t batch_tokens, ThreadPool& pool, const ScoreEvents& events = {});

// Returns the mean of table 1's accuracies, its last column; unset if one of its tasks is missing.
std::optional<double> table_average(std::span<const LmTaskResult> results);

// Returns the names of table 1's columns in their order: "wikitext word_perplexity", "lambada perplexity", …,
// "average".
std::vector<std::string> table_columns();

// Returns a row of table 1: {"wikitext word_perplexity": …, …}, the columns of the tasks that are in the results.
nlohmann::ordered_json table_row(std::span<const LmTaskResult> results);

// Returns {"piqa": {"file": …, "examples": n, "acc": …, "acc_stderr": …, "acc_norm": …, …}, …}; a standard error that
// the harness does not have is null.
nlohmann::ordered_json to_json(std::span<const LmTaskResult> results);

}  // namespace efla::eval
