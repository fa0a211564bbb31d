// The metrics of lm-evaluation-harness from log-likelihoods: accuracies, perplexities and their standard errors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/lm_tasks/task.h"
#include "efla/eval/likelihood.h"

namespace efla::eval {

struct Score {
  std::string name;
  double value = 0.0;
  std::optional<double> standard_error;  // unset where the harness has none
};

// Returns acc and, if `normalized`, acc_norm. likelihoods has all choices, example after example. A choice's score is
// its log-likelihood, for acc_norm divided by its characters; of equal scores the first counts.
std::vector<Score> choice_metrics(std::span<const data::MultipleChoice> examples,
                                  std::span<const Likelihood> likelihoods, bool normalized);

// Returns perplexity, exp of minus the mean log-likelihood of an answer, with a bootstrapped standard error; and acc,
// the share of answers that are greedy.
std::vector<Score> cloze_metrics(std::span<const Likelihood> likelihoods, ThreadPool& pool);

// Returns word_perplexity, byte_perplexity and bits_per_byte over all documents, and token_perplexity, which the
// harness does not have. log_likelihoods and tokens have one element per document.
std::vector<Score> document_metrics(std::span<const data::Document> documents, std::span<const double> log_likelihoods,
                                    std::span<const std::int64_t> tokens);

// Returns the sample standard deviation over √n; unset below two values.
std::optional<double> mean_standard_error(std::span<const double> values);

// Returns the sample standard deviation of exp(−mean) over resamples of the values, at least two, drawn with the
// harness's random numbers: groups of 1000 resamples, or of all if they are fewer. A group's number is its seed.
// Resamples beyond whole groups are left out. The same bits for any number of threads.
double bootstrapped_perplexity_error(std::span<const double> log_likelihoods, std::int64_t resamples, ThreadPool& pool);

}  // namespace efla::eval
