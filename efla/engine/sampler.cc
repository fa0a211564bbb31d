#include "efla/engine/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/check.h"

namespace efla::engine {
namespace {

struct Candidate {
  std::int32_t id;
  float logit;
  double weight;  // e^{(logit − largest) / T}
};

// Orders candidates: the largest logit first, of equal logits the lowest id.
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Sorts candidates as `before` orders them. Of equal logits the lower id must be first already. Sorts digit by digit of
// the logits' bits, because a sort by comparisons takes long where nearly all ids of a vocabulary are candidates.
void sort_by_logit(std::vector<Candidate>& candidates) {
  constexpr unsigned kBits = 8, kDigits = 1U << kBits;
  std::vector<Candidate> sorted(candidates.size());
  for (unsigned shift = 0; shift < 32; shift += kBits) {
    const auto digit = [shift](const Candidate& candidate) {
      const auto bits = std::bit_cast<std::uint32_t>(candidate.logit + 0.0F);  // −0 becomes 0
      const auto descending = bits >> 31 != 0 ? bits : ~(bits | 1U << 31);
      return descending >> shift & (kDigits - 1);
    };
    std::array<std::size_t, kDigits + 1> begins{};
    for (const auto& candidate : candidates) ++begins[digit(candidate) + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    for (const auto& candidate : candidates) sorted[begins[digit(candidate)]++] = candidate;
    candidates.swap(sorted);
  }
}

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
  const double total = total_weight(candidates), enough = p * total;
  // Together the candidates below this weight have at most half of what is not kept, so that none of them is kept.
  const double least = 0.5 * (1.0 - p) * total / static_cast<double>(candidates.size());
  std::erase_if(candidates, [&](const Candidate& candidate) { return candidate.weight < least; });
  sort_by_logit(candidates);
  double sum = 0.0;
  std::size_t kept = 0;
  do {
    sum += candidates[kept++].weight;
  } while (sum < enough && kept < candidates.size());
  candidates.resize(kept);
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

// Throws unless every logit is finite or −∞.
void check_finite(std::span<const float> logits) {
  std::int32_t wrong = 0;
  for (const float logit : logits) wrong |= logit < INFINITY ? 0 : 1;
  if (wrong == 0) return;
  const auto bad = std::find_if(logits.begin(), logits.end(), [](float logit) { return !(logit < INFINITY); });
  throw std::runtime_error("generate: the logit of token " + std::to_string(bad - logits.begin()) + " is not finite");
}

// Returns the id of the largest logit, of equal logits the lowest. Compares block by block, so that a compiler can
// compare several numbers at a time.
std::int64_t largest_of(std::span<const float> logits) {
  constexpr std::size_t kBlock = 256, kLanes = 16;
  float largest = -INFINITY;
  std::span<const float> found = logits;  // the first block that has the largest logit
  for (std::size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const auto block = logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    std::array<float, kLanes> lanes;
    lanes.fill(-INFINITY);
    std::size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = block[i + lane] > lanes[lane] ? block[i + lane] : lanes[lane];
      }
    }
    float most = *std::max_element(lanes.begin(), lanes.end());
    for (; i < block.size(); ++i) most = std::max(most, block[i]);
    if (most <= largest) continue;
    largest = most;
    found = block;
  }
  return std::find(found.begin(), found.end(), largest) - logits.begin();
}

}  // namespace

void validate(const SamplingOptions& options) {
  const Require require("generate");
  const double temperature = options.temperature, penalty = options.repetition_penalty;
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature", temperature,
          "0 (the most probable token) or more");
  require(options.top_k >= 0, "top_k", options.top_k, "a count, or 0 for all tokens");
  require(options.top_p >= 0.0 && options.top_p <= 1.0, "top_p", options.top_p,
          "0 (the most probable token) to 1 (all tokens)");
  require(penalty >= 0.01 && penalty <= 100.0, "repetition_penalty", penalty, "0.01 to 100; 1 changes nothing");
}

double unit_number(Random& random) {
  const std::uint64_t high = random.bits(), low = random.bits();
  return static_cast<double>((high << 21) | (low >> 11)) * 0x1p-53;
}

std::int64_t sample(std::span<const float> logits, const SeenIds& seen, const SamplingOptions& options,
                    Random& random) {
  check_finite(logits);
  std::vector<float> changed;
  if (options.repetition_penalty != 1.0) {
    changed.assign(logits.begin(), logits.end());
    const auto factor = static_cast<float>(options.repetition_penalty);
    for (std::size_t byte = 0; byte < seen.bits().size(); ++byte) {
      for (unsigned bits = seen.bits()[byte]; bits != 0; bits &= bits - 1) {
        const std::size_t id = 8 * byte + static_cast<std::size_t>(std::countr_zero(bits));
        if (id < changed.size()) changed[id] = penalised(changed[id], factor);
      }
    }
    logits = changed;
  }
  const std::int64_t first = largest_of(logits);
  const double largest = logits[static_cast<std::size_t>(first)];
  if (!(largest > -INFINITY)) throw std::runtime_error("generate: no token has a logit above -infinity");
  if (options.temperature == 0.0) return first;
  std::vector<Candidate> candidates(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) candidates[i] = {static_cast<std::int32_t>(i), logits[i], 0.0};
  keep_top_k(candidates, options.top_k);
  for (auto& candidate : candidates) {
    candidate.weight = std::exp((candidate.logit - largest) / options.temperature);
  }
  keep_top_p(candidates, options.top_p);
  return drawn(candidates, random);
}

}  // namespace efla::engine
