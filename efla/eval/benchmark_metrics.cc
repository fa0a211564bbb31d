#include "efla/eval/benchmark_metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "efla/base/python_random.h"

namespace efla::eval {
namespace {

constexpr std::int64_t kResamples = 100'000;
constexpr std::int64_t kGroup = 1'000;

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

double mean(std::span<const double> values) { return sum(values) / static_cast<double>(values.size()); }

double sample_deviation(std::span<const double> values) {
  const double center = mean(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - center) * (value - center);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

// Returns the index of the greatest value, the first of equal ones.
std::size_t best(std::span<const double> values) {
  return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

Score mean_metric(const char* name, std::span<const double> values) {
  return {name, mean(values), mean_standard_error(values)};
}

}  // namespace

std::vector<Score> choice_metrics(std::span<const data::MultipleChoice> examples,
                                  std::span<const Likelihood> likelihoods, bool normalized) {
  std::vector<double> right, right_normalized, scores;
  auto next = likelihoods.begin();
  for (const auto& example : examples) {
    scores.clear();
    for (std::size_t i = 0; i < example.choices.size(); ++i) scores.push_back((next++)->log_likelihood);
    right.push_back(best(scores) == example.gold ? 1.0 : 0.0);
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] /= static_cast<double>(example.choices[i].characters);
    right_normalized.push_back(best(scores) == example.gold ? 1.0 : 0.0);
  }
  std::vector<Score> metrics{mean_metric("acc", right)};
  if (normalized) metrics.push_back(mean_metric("acc_norm", right_normalized));
  return metrics;
}

std::vector<Score> cloze_metrics(std::span<const Likelihood> likelihoods, ThreadPool& pool) {
  std::vector<double> log_likelihoods, greedy;
  for (const auto& likelihood : likelihoods) {
    log_likelihoods.push_back(likelihood.log_likelihood);
    greedy.push_back(likelihood.greedy ? 1.0 : 0.0);
  }
  Score perplexity{"perplexity", std::exp(-mean(log_likelihoods)), {}};
  if (log_likelihoods.size() > 1) {
    perplexity.standard_error = bootstrapped_perplexity_error(log_likelihoods, kResamples, pool);
  }
  return {perplexity, mean_metric("acc", greedy)};
}

std::vector<Score> document_metrics(std::span<const data::Document> documents, std::span<const double> log_likelihoods,
                                    std::span<const std::int64_t> tokens) {
  double words = 0.0, bytes = 0.0;
  for (const auto& document : documents) {
    words += static_cast<double>(document.words);
    bytes += static_cast<double>(document.bytes);
  }
  const double all_tokens = static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}));
  const double loss = -sum(log_likelihoods);
  return {{"word_perplexity", std::exp(loss / words), {}},
          {"byte_perplexity", std::exp(loss / bytes), {}},
          {"bits_per_byte", loss / bytes / std::log(2.0), {}},
          {"token_perplexity", std::exp(loss / all_tokens), {}}};
}

std::optional<double> mean_standard_error(std::span<const double> values) {
  if (values.size() < 2) return {};
  return sample_deviation(values) / std::sqrt(static_cast<double>(values.size()));
}

double bootstrapped_perplexity_error(std::span<const double> log_likelihoods, std::int64_t resamples,
                                     ThreadPool& pool) {
  const std::int64_t group = std::min(kGroup, resamples);
  const std::int64_t groups = resamples / group;
  const auto count = static_cast<double>(log_likelihoods.size());
  std::vector<double> perplexities(static_cast<std::size_t>(groups * group));
  pool.run(groups, [&](std::int64_t i_group, int) {
    PythonRandom random(static_cast<std::uint32_t>(i_group));
    for (std::int64_t i = 0; i < group; ++i) {
      double total = 0.0;
      for (std::size_t n = 0; n < log_likelihoods.size(); ++n) {
        total += log_likelihoods[static_cast<std::size_t>(random.uniform() * count)];
      }
      perplexities[static_cast<std::size_t>(i_group * group + i)] = std::exp(-total / count);
    }
  });
  return sample_deviation(perplexities);
}

}  // namespace efla::eval
