// A decode state that can be taken back: what speculative decoding needs when it rejects tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/ops/delta.h"

namespace efla {

// The states [B, HV, K, V] of a decoding and the means to return to the state before any of its last `memory` tokens,
// to the same bits. It keeps two snapshots and the k, v, beta and g of at most 2·memory tokens: three states in all
// whatever `memory` is, one state copied every `memory` tokens, and a return replays fewer than `memory` of them. T:
// float or bfloat16, of the inputs; S: float or bfloat16, of the states.
template <class T, class S = State<T>>
class DecodeState {
 public:
  // shape.tokens is 1. memory ≥ 0. The states start at zero. Throws Error.
  DecodeState(const DeltaShape& shape, const DeltaRule& rule, std::int64_t memory);

  // Starts from these states [B, HV, K, V], for example those after a prompt. Nothing before them can be returned to.
  void start_from(const View<const S, 4>& states);

  // Takes one token: q, k [B, H, K], v [B, HV, V], beta [B, HV], g [B, HV, 1 or K] by rule.decay; writes o [B, HV, V].
  // Throws Error as delta_step does, and then nothing has changed.
  void step(const View<const T, 3>& q, const View<const T, 3>& k, const View<const T, 3>& v,
            const View<const T, 2>& beta, const View<const State<T>, 3>& g, const View<T, 3>& o,
            const RunOptions& options = {});

  // Takes back the last `count` tokens. Throws Error unless count is in [0, returnable()].
  void roll_back(std::int64_t count, const RunOptions& options = {});

  std::int64_t tokens() const { return tokens_; }  // taken since the start and not taken back
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
