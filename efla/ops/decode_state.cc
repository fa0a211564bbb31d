#include "efla/ops/decode_state.h"

#include <algorithm>
#include <array>
#include <string>

#include "efla/base/error.h"
#include "efla/rule/validate.h"

namespace efla {
namespace {

constexpr std::int64_t kMaxMemory = 1 << 20;

// Returns the elements in row-major order; none of an absent view.
template <class T, int Rank>
std::vector<std::remove_const_t<T>> elements(const View<T, Rank>& view) {
  std::vector<std::remove_const_t<T>> all;
  if (!view) return all;
  all.reserve(view.size());
  std::array<std::int64_t, Rank> index{};
  for (std::int64_t n = view.size(); n > 0; --n) {
    const T* element = view.data;
    for (int d = 0; d < Rank; ++d) element += index[d] * view.stride[d];
    all.push_back(*element);
    for (int d = Rank - 1; d >= 0 && ++index[d] == view.extent[d]; --d) index[d] = 0;
  }
  return all;
}

}  // namespace

template <class T, class S>
DecodeState<T, S>::DecodeState(const DeltaShape& shape, const DeltaRule& rule, std::int64_t memory)
    : shape_(shape), rule_(rule), memory_(memory) {
  if (memory < 0 || memory > kMaxMemory) {
    throw Error("decode_state", "memory", std::to_string(memory), "0 to " + std::to_string(kMaxMemory));
  }
  validate_step("decode_state", shape, rule);
  states_.assign(shape.batch * shape.value_heads * shape.key_dim * shape.value_dim, S{});
  older_ = newer_ = {0, states_};
  ring_.resize(2 * memory);
}

template <class T, class S>
void DecodeState<T, S>::restore(const View<const S, 4>& states) {
  const std::array<std::int64_t, 4> expected{shape_.batch, shape_.value_heads, shape_.key_dim, shape_.value_dim};
  if (!states || states.extent != expected) {
    throw Error("decode_state", "states", states ? "another shape" : "nothing", "[B, HV, K, V] of the shape given");
  }
  states_ = elements(states);
  tokens_ = 0;
  older_ = newer_ = {0, states_};
}

template <class T, class S>
DeltaStep<T, S> DecodeState<T, S>::problem(std::vector<S>& states) const {
  DeltaStep<T, S> p;
  p.shape = shape_;
  p.rule = rule_;
  p.state = View<S, 4>::contiguous(states.data(), {shape_.batch, shape_.value_heads, shape_.key_dim, shape_.value_dim});
  return p;
}

template <class T, class S>
void DecodeState<T, S>::step(const View<const T, 3>& q, const View<const T, 3>& k, const View<const T, 3>& v,
                             const View<const T, 2>& beta, const View<const State<T>, 3>& g, const View<T, 3>& o,
                             const RunOptions& options) {
  DeltaStep<T, S> p = problem(states_);
  p.q = q;
  p.k = k;
  p.v = v;
  p.beta = beta;
  p.g = g;
  p.o = o;
  delta_step(p, options);
  if (memory_ > 0) ring_[tokens_ % ring_.size()] = {elements(k), elements(v), elements(beta), elements(g)};
  ++tokens_;
  if (memory_ > 0 && tokens_ - newer_.tokens == memory_) {
    std::swap(older_, newer_);
    newer_.tokens = tokens_;
    newer_.states = states_;
  }
}

template <class T, class S>
std::int64_t DecodeState<T, S>::returnable() const {
  return std::min(memory_, tokens_ - older_.tokens);
}

template <class T, class S>
void DecodeState<T, S>::roll_back(std::int64_t count, const RunOptions& options) {
  if (count < 0 || count > returnable()) {
    throw Error("decode_state", "count", std::to_string(count), "0 to " + std::to_string(returnable()));
  }
  if (count == 0) return;
  const std::int64_t target = tokens_ - count;
  if (newer_.tokens > target) newer_ = older_;
  states_ = newer_.states;
  std::vector<T> q(shape_.batch * shape_.heads * shape_.key_dim),
      o(shape_.batch * shape_.value_heads * shape_.value_dim);
  DeltaStep<T, S> p = problem(states_);
  const std::array<std::int64_t, 3> keys{shape_.batch, shape_.heads, shape_.key_dim};
  const std::array<std::int64_t, 3> values{shape_.batch, shape_.value_heads, shape_.value_dim};
  p.q = View<const T, 3>::contiguous(q.data(), keys);
  p.o = View<T, 3>::contiguous(o.data(), values);
  for (tokens_ = newer_.tokens; tokens_ < target; ++tokens_) {
    const Token& token = ring_[tokens_ % ring_.size()];
    p.k = View<const T, 3>::contiguous(token.k.data(), keys);
    p.v = View<const T, 3>::contiguous(token.v.data(), values);
    p.beta = View<const T, 2>::contiguous(token.beta.data(), {shape_.batch, shape_.value_heads});
    if (!token.g.empty()) {
      const std::int64_t channels = rule_.decay == Decay::channel ? shape_.key_dim : 1;
      p.g = View<const State<T>, 3>::contiguous(token.g.data(), {shape_.batch, shape_.value_heads, channels});
    }
    delta_step(p, options);
  }
}

template <class T, class S>
View<const S, 4> DecodeState<T, S>::states() const {
  return View<const S, 4>::contiguous(states_.data(),
                                      {shape_.batch, shape_.value_heads, shape_.key_dim, shape_.value_dim});
}

template class DecodeState<float, float>;
template class DecodeState<float, bfloat16>;
template class DecodeState<bfloat16, float>;
template class DecodeState<bfloat16, bfloat16>;

}  // namespace efla
