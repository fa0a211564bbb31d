// Several steps of the recurrence per token: DeltaProduct (Siems et al., 2025, arXiv 2502.10297).
//
// T of a problem counts steps. n consecutive steps are one token: its first step alone decays the state, and its last
// step alone is read. So q, g and o, and their gradients, have one row per token, [B, T/n, …], and all other inputs one
// per step. n follows from the rows of q. T and the ends of packed sequences are multiples of n.
#pragma once

#include <cstdint>

#include "efla/rule/problem.h"

namespace efla {

// Returns n of a DeltaForward, DeltaBackward or DeltaSteps; 1 if its q is absent or has no rows.
template <class Problem>
constexpr std::int64_t steps_per_token(const Problem& p) {
  const std::int64_t rows = p.q.extent[1];
  return rows < 1 || rows >= p.shape.tokens ? 1 : p.shape.tokens / rows;
}

// The tokens of a range of steps.
struct MicroSteps {
  std::int64_t n = 1;  // steps per token

  // Tokens [first, last), the row of one of their steps in the range being `step_row`.
  struct Tokens {
    std::int64_t first, last, n, offset;

    constexpr std::int64_t count() const { return last - first; }
    constexpr std::int64_t step_row(std::int64_t token) const { return token * n + offset; }
  };

  constexpr bool decays(std::int64_t step) const { return step % n == 0; }
  constexpr bool is_read(std::int64_t step) const { return step % n == n - 1; }
  constexpr std::int64_t token(std::int64_t step) const { return step / n; }

  // Returns the tokens whose first step is one of [begin, end).
  constexpr Tokens decayed(std::int64_t begin, std::int64_t end) const {
    return {(begin + n - 1) / n, (end + n - 1) / n, n, -begin};
  }
  // Returns the tokens whose last step is one of [begin, end).
  constexpr Tokens read(std::int64_t begin, std::int64_t end) const { return {begin / n, end / n, n, n - 1 - begin}; }
};

}  // namespace efla
