// A decode state on the CPU that can roll back its last tokens, as speculative decoding needs when it rejects drafts.
// docs/ops/delta_rule_step.md describes it.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/ops/delta.h"

namespace efla {

// The states [B, HV, K, V] of a decoding. Any of the last `memory` tokens can be rolled back, and the states then have
// the bits that they had before this token. The object keeps the states, two snapshots of them, and the k, v, beta and
// g of at most 2·memory tokens. One state is copied per `memory` tokens, and a rollback computes fewer than `memory`
// tokens again. T: float or bfloat16, of the inputs; S: float or bfloat16, of the states.
template <class T, class S = State<T>>
class DecodeState {
 public:
  // shape.tokens is 1. memory is from 0 to 2²⁰. The states start at zero. Throws Error for a bad memory, shape
  // or rule.
  DecodeState(const DeltaShape& shape, const DeltaRule& rule, std::int64_t memory);

  // Continues from these states [B, HV, K, V], for example after a prompt. Earlier tokens can then not be rolled back.
  // Throws Error for another shape.
  void restore(const View<const S, 4>& states);

  // Takes one token: q, k [B, H, K], v [B, HV, V], beta [B, HV], g [B, HV, 1 or K] by rule.decay; writes o [B, HV, V].
  // Throws Error as delta_step does; the states are then unchanged.
  void step(const View<const T, 3>& q, const View<const T, 3>& k, const View<const T, 3>& v,
            const View<const T, 2>& beta, const View<const State<T>, 3>& g, const View<T, 3>& o,
            const RunOptions& options = {});

  // Rolls back the last `count` tokens. Throws Error unless count is in [0, returnable()].
  void roll_back(std::int64_t count, const RunOptions& options = {});

  std::int64_t tokens() const { return tokens_; }  // since the start or restore, without tokens that were rolled back
  std::int64_t returnable() const;                 // the number of tokens that roll_back takes, at most memory
  View<const S, 4> states() const;

 private:
  struct Token {
    std::vector<T> k, v, beta;
    std::vector<State<T>> g;
  };
  struct Snapshot {
    std::int64_t tokens = 0;
    std::vector<S> states;
  };

  DeltaStep<T, S> problem(std::vector<S>& states) const;

  DeltaShape shape_;
  DeltaRule rule_;
  std::int64_t memory_, tokens_ = 0;
  std::vector<S> states_;
  Snapshot older_, newer_;
  std::vector<Token> ring_;  // token t, counted as in tokens(), is at index t modulo 2·memory
};

}  // namespace efla
