#include "efla/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "efla/base/check.h"

namespace efla::generate {
namespace {

struct Candidate {
  std::int64_t id;
  float logit;
  double weight;  // e^{(logit − largest) / T}
};

// Orders candidates: the largest logit first, of equal logits the lowest id.
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

double total_weight(const std::vector<Candidate>& candidates) {
  double total = 0.0;
  for (const auto& candidate : candidates) total += candidate.weight;
  return total;
}

void keep_top_k(std::vector<Candidate>& candidates, std::int64_t k) {
  if (k == 0 || std::cmp_greater_equal(k, candidates.size())) return;
  std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), before);
  candidates.resize(k);
}

void keep_top_p(std::vector<Candidate>& candidates, double p) {
  if (p == 1.0) return;
  const double enough = p * total_weight(candidates);
  const auto behind = [](const Candidate& a, const Candidate& b) { return before(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), behind);
  std::vector<Candidate> kept;
  double sum = 0.0;
  do {
    std::pop_heap(candidates.begin(), candidates.end(), behind);
    kept.push_back(candidates.back());
    candidates.pop_back();
    sum += kept.back().weight;
  } while (sum < enough && !candidates.empty());
  candidates = std::move(kept);
}

std::int64_t drawn(const std::vector<Candidate>& candidates, Random& random) {
  const double place = unit_number(random) * total_weight(candidates);
  double sum = 0.0;
  std::int64_t last = 0;
  for (const auto& candidate : candidates) {
    sum += candidate.weight;
    if (place < sum) return candidate.id;
    if (candidate.weight > 0.0) last = candidate.id;
  }
  return last;  // rounding made `place` as large as the sum of all weights
}

// Calls visit(id, logit) for every token, the logit after the penalty.
template <class Visit>
void for_each_penalised(std::span<const float> logits, const SeenIds& seen, double penalty, Visit&& visit) {
  const auto factor = static_cast<float>(penalty);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto id = static_cast<std::int64_t>(i);
    float logit = logits[i];
    if (!(logit < INFINITY)) {
      throw std::runtime_error("generate: the logit of token " + std::to_string(id) + " is not finite");
    }
    if (penalty != 1.0 && seen.contains(id)) logit = penalised(logit, factor);
    visit(id, logit);
  }
}

}  // namespace

void validate(const SamplingOptions& options) {
  const Require require("generate");
  const double temperature = options.temperature, penalty = options.repetition_penalty;
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature", temperature,
          "0 (the most probable token) or more");
  require(options.top_k >= 0, "top_k", options.top_k, "a count, or 0 for all tokens");
  require(options.top_p > 0.0 && options.top_p <= 1.0, "top_p", options.top_p, "a number above 0 and at most 1");
  require(penalty >= 0.01 && penalty <= 100.0, "repetition_penalty", penalty, "0.01 to 100; 1 changes nothing");
}

double unit_number(Random& random) {
  const std::uint64_t high = random.bits(), low = random.bits();
  return static_cast<double>((high << 21) | (low >> 11)) * 0x1p-53;
}

std::int64_t sample(std::span<const float> logits, const SeenIds& seen, const SamplingOptions& options,
                    Random& random) {
  Candidate first{0, -INFINITY, 0.0};
  std::vector<Candidate> candidates;
  if (options.temperature > 0.0) candidates.reserve(logits.size());
  for_each_penalised(logits, seen, options.repetition_penalty, [&](std::int64_t id, float logit) {
    if (logit > first.logit) first = {id, logit, 0.0};
    if (options.temperature > 0.0) candidates.push_back({id, logit, 0.0});
  });
  if (!(first.logit > -INFINITY)) throw std::runtime_error("generate: no token has a logit above -infinity");
  if (options.temperature == 0.0) return first.id;
  keep_top_k(candidates, options.top_k);
  const double largest = first.logit;
  for (auto& candidate : candidates) {
    candidate.weight = std::exp((candidate.logit - largest) / options.temperature);
  }
  keep_top_p(candidates, options.top_p);
  return drawn(candidates, random);
}

}  // namespace efla::generate
