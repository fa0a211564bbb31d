// Draws the next token of a reply from a row of logits, and scores tokens.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "efla/base/random.h"
#include "efla/engine/engine.h"
#include "efla/engine/sampler.h"

namespace efla::engine {

// Throws Error that names the field.
void validate(const RequestSampling& options, std::int64_t vocab_size);

// The numbers of times that ids occurred in a reply.
using IdCounts = std::map<std::int32_t, std::int64_t>;

// Draws an id as RequestSampling says. Changes the logits. Throws std::runtime_error if a logit is NaN or +infinity, or
// if all tokens are excluded.
std::int32_t draw(std::span<float> logits, const RequestSampling& options, const SeenIds& seen, const IdCounts& counts,
                  Random& random);

// log p of ids under the softmax of a row of logits.
class Scorer {
 public:
  // Only the first `drawable` ids are alternatives, because a tokenizer may have fewer than the model.
  Scorer(std::span<const float> logits, std::int64_t drawable);

  ScoredId score(std::int32_t id) const;
  // Returns the `count` most probable ids in falling order; of equal ones the lower id comes first.
  std::vector<ScoredId> best(std::int64_t count) const;

 private:
  std::span<const float> logits_;
  std::int64_t drawable_;
  double log_sum_ = 0.0;
};

}  // namespace efla::engine
