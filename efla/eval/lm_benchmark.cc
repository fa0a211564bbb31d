#include "efla/eval/lm_benchmark.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace efla::eval {
namespace {

constexpr const char* kAverage = "average";  // table 1's last column

struct Texts {
  std::string_view context, continuation;
};

// Makes the requests of each kind of example.
class RequestMaker {
 public:
  RequestMaker(const data::Tokenizer& tokenizer, const TextOptions& options, ThreadPool& pool)
      : tokenizer_(tokenizer), options_(options), pool_(pool) {}

  LmTaskRequests operator()(const std::vector<data::MultipleChoice>& examples) const {
    std::vector<Texts> texts;
    for (const auto& example : examples) {
      for (const auto& choice : example.choices) texts.push_back({choice.context, choice.continuation});
    }
    return requests_of(texts);
  }

  LmTaskRequests operator()(const std::vector<data::Cloze>& examples) const {
    std::vector<Texts> texts;
    for (const auto& example : examples) texts.push_back({example.context, example.continuation});
    return requests_of(texts);
  }

  LmTaskRequests operator()(const std::vector<data::Document>& documents) const {
    LmTaskRequests all;
    for (const auto& document : documents) {
      for (auto& window : document_requests(tokenizer_, document.text, options_)) {
        all.requests.push_back(std::move(window));
      }
      all.ends.push_back(all.requests.size());
    }
    return all;
  }

 private:
  LmTaskRequests requests_of(const std::vector<Texts>& texts) const {
    LmTaskRequests all{std::vector<ScoreRequest>(texts.size()), {}};
    pool_.run(static_cast<std::int64_t>(texts.size()), [&](std::int64_t i, int) {
      const auto& [context, continuation] = texts[static_cast<std::size_t>(i)];
      all.requests[static_cast<std::size_t>(i)] = continuation_request(tokenizer_, context, continuation, options_);
    });
    return all;
  }

  const data::Tokenizer& tokenizer_;
  const TextOptions& options_;
  ThreadPool& pool_;
};

// Makes metrics from the likelihoods of the requests, for each kind of example.
class TaskMetrics {
 public:
  TaskMetrics(const LmTaskRequests& requests, const std::vector<Likelihood>& likelihoods, ThreadPool& pool,
              bool normalized)
      : requests_(requests), likelihoods_(likelihoods), pool_(pool), normalized_(normalized) {}

  std::vector<Score> operator()(const std::vector<data::MultipleChoice>& examples) const {
    return choice_metrics(examples, likelihoods_, normalized_);
  }

  std::vector<Score> operator()(const std::vector<data::Cloze>& /*examples*/) const {
    return cloze_metrics(likelihoods_, pool_);
  }

  std::vector<Score> operator()(const std::vector<data::Document>& documents) const {
    std::vector<double> log_likelihoods(documents.size());
    std::vector<std::int64_t> tokens(documents.size());
    for (std::size_t i = 0, request = 0; i < documents.size(); ++i) {
      for (; request < requests_.ends[i]; ++request) {
        log_likelihoods[i] += likelihoods_[request].log_likelihood;
        tokens[i] += requests_.requests[request].scored;
      }
    }
    return document_metrics(documents, log_likelihoods, tokens);
  }

 private:
  const LmTaskRequests& requests_;
  const std::vector<Likelihood>& likelihoods_;
  ThreadPool& pool_;
  bool normalized_;
};

std::int64_t count_unknown_words(const data::LmTask& task) {
  std::int64_t words = 0;
  if (const auto* documents = std::get_if<std::vector<data::Document>>(&task.examples)) {
    for (const auto& document : *documents) words += document.unknown_words;
  }
  return words;
}

bool is_accuracy(std::string_view metric) { return metric.starts_with("acc"); }

std::string column_of(std::string_view task, std::string_view metric) {
  return std::string(task) + " " + std::string(metric);
}

}  // namespace

const Score& LmTaskResult::score(std::string_view name) const {
  const auto found = std::find_if(scores.begin(), scores.end(), [&](const Score& score) { return score.name == name; });
  if (found == scores.end()) throw std::out_of_range("no score " + std::string(name) + " of " + task);
  return *found;
}

LmTaskRequests lm_task_requests(const data::LmTask& task, const data::Tokenizer& tokenizer, const TextOptions& options,
                                ThreadPool& pool) {
  return std::visit(RequestMaker(tokenizer, options, pool), task.examples);
}

LmTaskResult evaluate_lm_task(const data::LmTask& task, const LmTaskRequests& requests, const Scorer& scorer,
                              std::int64_t batch_tokens, ThreadPool& pool, const ScoreEvents& events) {
  const auto likelihoods = score(requests.requests, scorer, batch_tokens, events);
  const TaskMetrics metrics(requests, likelihoods, pool, data::lm_task_info(task.name).normalized);
  LmTaskResult result{task.name, task.file, 0, std::visit(metrics, task.examples), count_unknown_words(task)};
  std::visit([&](const auto& examples) { result.examples = static_cast<std::int64_t>(examples.size()); },
             task.examples);
  return result;
}

std::optional<double> table_average(std::span<const LmTaskResult> results) {
  double sum = 0.0;
  int count = 0;
  for (const auto& info : data::lm_tasks()) {
    for (const auto metric : info.table_metrics) {
      if (!is_accuracy(metric)) continue;
      const auto found =
          std::find_if(results.begin(), results.end(), [&](const LmTaskResult& r) { return r.task == info.name; });
      if (found == results.end()) return {};
      sum += found->score(metric).value;
      ++count;
    }
  }
  return sum / count;
}

std::vector<std::string> table_columns() {
  std::vector<std::string> names;
  for (const auto& info : data::lm_tasks()) {
    for (const auto metric : info.table_metrics) names.push_back(column_of(info.name, metric));
  }
  names.emplace_back(kAverage);
  return names;
}

nlohmann::ordered_json table_row(std::span<const LmTaskResult> results) {
  auto row = nlohmann::ordered_json::object();
  for (const auto& result : results) {
    for (const auto metric : data::lm_task_info(result.task).table_metrics) {
      row[column_of(result.task, metric)] = result.score(metric).value;
    }
  }
  if (const auto average = table_average(results)) row[kAverage] = *average;
  return row;
}

nlohmann::ordered_json to_json(std::span<const LmTaskResult> results) {
  auto all = nlohmann::ordered_json::object();
  for (const auto& result : results) {
    auto& task = all[result.task];
    task = {{"file", result.file}, {"examples", result.examples}};
    if (result.unknown_words > 0) task["unknown_words"] = result.unknown_words;
    for (const auto& [name, value, standard_error] : result.scores) {
      task[name] = value;
      task[name + "_stderr"] = nullptr;
      if (standard_error) task[name + "_stderr"] = *standard_error;
    }
  }
  return all;
}

}  // namespace efla::eval
