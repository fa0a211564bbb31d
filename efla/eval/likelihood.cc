#include "efla/eval/likelihood.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>

#include "efla/base/error.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::eval {
namespace {

constexpr const char* kEvalLm = "eval lm";

void check_bos(const data::Tokenizer& tokenizer, const TextOptions& options) {
  if (options.bos && tokenizer.bos() < 0) throw Error(kEvalLm, "bos", "a tokenizer without bos", "one with it");
}

// Returns the token in front of a text without a context.
std::int32_t prefix_token(const data::Tokenizer& tokenizer) {
  if (tokenizer.bos() >= 0) return tokenizer.bos();
  if (tokenizer.eos() >= 0) return tokenizer.eos();
  throw Error(kEvalLm, "tokenizer", "'" + tokenizer.info().name + "' with neither bos nor eos", "one of them");
}

std::vector<std::int32_t> encode(const data::Tokenizer& tokenizer, std::string_view text, bool bos) {
  auto tokens = tokenizer.encode(text);
  if (bos) tokens.insert(tokens.begin(), tokenizer.bos());
  return tokens;
}

// Returns the tokens that the model reads: all but the last.
std::span<const std::int32_t> inputs_of(const ScoreRequest& request) {
  return std::span(request.tokens).first(request.tokens.size() - 1);
}

// Returns an order of the requests: the longest first, and equal inputs side by side.
std::vector<std::size_t> batch_order(const std::vector<ScoreRequest>& requests) {
  std::vector<std::size_t> order(requests.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto left = inputs_of(requests[a]), right = inputs_of(requests[b]);
    if (left.size() != right.size()) return left.size() > right.size();
    return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
  });
  return order;
}

// Rows of one batch, for the requests order[begin, end).
struct PlannedBatch {
  ScoreBatch batch;
  std::size_t end = 0;
};

PlannedBatch plan_batch(const std::vector<ScoreRequest>& requests, const std::vector<std::size_t>& order,
                        std::size_t begin, std::int64_t batch_tokens) {
  PlannedBatch plan;
  auto& batch = plan.batch;
  batch.length = static_cast<std::int64_t>(inputs_of(requests[order[begin]]).size());
  std::span<const std::int32_t> previous;
  for (plan.end = begin; plan.end < order.size(); ++plan.end) {
    const auto& request = requests[order[plan.end]];
    const auto inputs = inputs_of(request);
    if (batch.rows == 0 || !std::equal(inputs.begin(), inputs.end(), previous.begin(), previous.end())) {
      if (batch.rows > 0 && (batch.rows + 1) * batch.length > batch_tokens) break;
      batch.rows += 1;
      batch.tokens.insert(batch.tokens.end(), inputs.begin(), inputs.end());
      batch.tokens.resize(static_cast<std::size_t>(batch.rows * batch.length), 0);
      previous = inputs;
    }
    const auto size = static_cast<std::int64_t>(request.tokens.size());
    for (std::int64_t i = size - request.scored; i < size; ++i) {
      batch.targets.push_back({batch.rows - 1, i - 1, request.tokens[static_cast<std::size_t>(i)]});
    }
  }
  return plan;
}

}  // namespace

ScoreRequest continuation_request(const data::Tokenizer& tokenizer, std::string_view context,
                                  std::string_view continuation, const TextOptions& options) {
  check_bos(tokenizer, options);
  const auto kept = data::rstrip(context).size();
  ScoreRequest request;
  std::size_t before = 1;
  if (kept > 0) {
    request.tokens = encode(tokenizer, std::string(context).append(continuation), options.bos);
    before = encode(tokenizer, context.substr(0, kept), options.bos).size();
  } else {
    request.tokens = tokenizer.encode(std::string(context).append(continuation));
    const auto prefix = prefix_token(tokenizer);
    if (request.tokens.empty() || request.tokens.front() != prefix) {
      request.tokens.insert(request.tokens.begin(), prefix);
    }
  }
  if (request.tokens.size() <= before) {
    throw Error(kEvalLm, "continuation '" + std::string(continuation) + "'", "no token of its own",
                "at least one behind its context's");
  }
  request.scored = static_cast<std::int64_t>(request.tokens.size() - before);
  if (request.scored > options.max_length) {
    throw Error(kEvalLm, "max_length", std::to_string(options.max_length),
                "at least the " + std::to_string(request.scored) + " tokens of an answer");
  }
  const auto excess = static_cast<std::int64_t>(request.tokens.size()) - options.max_length - 1;
  if (excess > 0) request.tokens.erase(request.tokens.begin(), request.tokens.begin() + excess);
  return request;
}

std::vector<ScoreRequest> document_requests(const data::Tokenizer& tokenizer, std::string_view text,
                                            const TextOptions& options) {
  check_bos(tokenizer, options);
  auto tokens = tokenizer.encode(text);
  tokens.insert(tokens.begin(), prefix_token(tokenizer));
  const auto all = static_cast<std::int64_t>(tokens.size());
  std::vector<ScoreRequest> requests;
  for (std::int64_t done = 1; done < all;) {
    const auto scored = std::min(options.max_length, all - done);
    const auto end = done + scored;
    // A window's context is one token, but for the last, which is filled up with what came before.
    const auto begin = std::max<std::int64_t>(0, end - options.max_length - 1);
    requests.push_back({{tokens.begin() + begin, tokens.begin() + end}, scored});
    done = end;
  }
  return requests;
}

std::vector<Likelihood> score(const std::vector<ScoreRequest>& requests, const Scorer& scorer,
                              std::int64_t batch_tokens, const ScoreEvents& events) {
  const auto order = batch_order(requests);
  std::vector<Likelihood> likelihoods(requests.size());
  for (std::size_t begin = 0; begin < order.size();) {
    if (events.stop && events.stop()) throw Stopped();
    const auto plan = plan_batch(requests, order, begin, batch_tokens);
    const auto scores = scorer(plan.batch);
    if (scores.size() != plan.batch.targets.size()) throw std::logic_error("a scorer left targets out");
    auto next = scores.begin();
    for (; begin < plan.end; ++begin) {
      auto& likelihood = likelihoods[order[begin]];
      for (std::int64_t i = 0; i < requests[order[begin]].scored; ++i, ++next) {
        if (std::isnan(next->log_probability)) {
          throw std::runtime_error("eval lm: the model's probabilities are not numbers");
        }
        likelihood.log_likelihood += next->log_probability;
        likelihood.greedy &= next->greedy;
      }
    }
    if (events.progress) events.progress(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(order.size()));
  }
  return likelihoods;
}

}  // namespace efla::eval
