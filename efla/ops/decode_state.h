// A decode state that rolls back its last tokens, as speculative decoding needs when it rejects them.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/ops/delta.h"

namespace efla {

// The states [B, HV, K, V] of a decoding. They can be rolled back to before any of the last `memory` tokens, with the
// same bits. The object keeps two snapshots and the k, v, beta and g of at most 2·memory tokens: three states in all
// for any `memory`. One state is copied per `memory` tokens, and a rollback computes fewer than `memory` tokens again.
// T: float or bfloat16, of the inputs; S: float or bfloat16, of the states.
template <class T, class S = State<T>>
class DecodeState {
 public:
  // shape.tokens is 1. memory ≥ 0. The states start at zero. Throws Error.
  DecodeState(const DeltaShape& shape, const DeltaRule& rule, std::int64_t memory);

  // Continues from these states [B, HV, K, V], for example after a prompt. They cannot be rolled back to earlier ones.
  void restore(const View<const S, 4>& states);

  // Takes one token: q, k [B, H, K], v [B, HV, V], beta [B, HV], g [B, HV, 1 or K] by rule.decay; writes o [B, HV, V].
  // Throws Error as delta_step does, and then nothing has changed.
  void step(const View<const T, 3>& q, const View<const T, 3>& k, const View<const T, 3>& v,
            const View<const T, 2>& beta, const View<const State<T>, 3>& g, const View<T, 3>& o,
            const RunOptions& options = {});

  // Rolls back the last `count` tokens. Throws Error unless count is in [0, returnable()].
  void roll_back(std::int64_t count, const RunOptions& options = {});

  std::int64_t tokens() const { return tokens_; }  // since the start, without tokens that were rolled back
  std::int64_t returnable() const;                 // at most memory
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
  std::vector<Token> ring_;  // token t, counted from the start, at t modulo its size
};

}  // namespace efla
