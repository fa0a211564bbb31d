#include "efla/engine/request_sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "efla/base/check.h"

namespace efla::engine {
namespace {

constexpr double kExcluded = -100.0;  // of logit_bias

bool within(double value, double low, double high) { return value >= low && value <= high; }

}  // namespace

void validate(const RequestSampling& options, std::int64_t vocab_size) {
  validate(options);
  const Require require("request");
  require(within(options.presence_penalty, -2.0, 2.0), "presence_penalty", options.presence_penalty, "-2 to 2");
  require(within(options.frequency_penalty, -2.0, 2.0), "frequency_penalty", options.frequency_penalty, "-2 to 2");
  for (const auto& [id, bias] : options.logit_bias) {
    require(id >= 0 && id < vocab_size, "logit_bias", "token " + std::to_string(id),
            "0 to " + std::to_string(vocab_size - 1));
    require(within(bias, -100.0, 100.0), "logit_bias", bias, "-100 to 100");
  }
}

std::int32_t draw(std::span<float> logits, const RequestSampling& options, const SeenIds& seen, const IdCounts& counts,
                  Random& random) {
  for (const auto& [id, bias] : options.logit_bias) {
    float& logit = logits[static_cast<std::size_t>(id)];
    logit = bias <= kExcluded ? -INFINITY : logit + static_cast<float>(bias);
  }
  if (options.repetition_penalty != 1.0) {
    const auto factor = static_cast<float>(options.repetition_penalty);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (seen.contains(static_cast<std::int64_t>(i))) logits[i] = penalised(logits[i], factor);
    }
  }
  for (const auto& [id, count] : counts) {
    logits[static_cast<std::size_t>(id)] -=
        static_cast<float>(options.presence_penalty + options.frequency_penalty * static_cast<double>(count));
  }
  SamplingOptions rest = options;
  rest.repetition_penalty = 1.0;
  return static_cast<std::int32_t>(sample(logits, seen, rest, random));
}

Scorer::Scorer(std::span<const float> logits, std::int64_t drawable) : logits_(logits), drawable_(drawable) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  log_sum_ = largest + std::log(sum);
}

ScoredId Scorer::score(std::int32_t id) const {
  return {id, static_cast<float>(logits_[static_cast<std::size_t>(id)] - log_sum_)};
}

std::vector<ScoredId> Scorer::best(std::int64_t count) const {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(drawable_));
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min<std::ptrdiff_t>(count, std::ssize(ids));
  const auto at = [&](std::int32_t id) { return logits_[static_cast<std::size_t>(id)]; };
  std::partial_sort(ids.begin(), end, ids.end(),
                    [&](std::int32_t a, std::int32_t b) { return at(a) > at(b) || (at(a) == at(b) && a < b); });
  std::vector<ScoredId> scored;
  std::transform(ids.begin(), end, std::back_inserter(scored), [&](std::int32_t id) { return score(id); });
  return scored;
}

}  // namespace efla::engine
