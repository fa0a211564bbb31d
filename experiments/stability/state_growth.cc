#include "experiments/stability/state_growth.h"

#include <array>
#include <cmath>

#include "efla/base/random.h"
#include "efla/ops/delta.h"

namespace efla::experiments {
namespace {

constexpr std::int64_t kKeyDim = kStateDim, kValueDim = kStateDim;

// Returns a number as an operator on T gets it.
template <class T>
T input(float x, const Precision& precision) {
  return from_state<T>(precision.bfloat16_inputs ? to_float(to_bfloat16(x)) : x);
}

// Returns element i of a key of squared length lambda.
float key_element(const Stream& stream, double lambda, std::int64_t direction, std::int64_t i) {
  return static_cast<float>(std::sqrt(lambda)) * stream.directions[direction * kKeyDim + i];
}

template <class T>
double norm(const std::array<T, kKeyDim * kValueDim>& state) {
  std::array<double, kValueDim> sums{};  // of columns: sums that do not wait for one another
  for (std::int64_t i = 0; i < kKeyDim; ++i) {
    for (std::int64_t j = 0; j < kValueDim; ++j) {
      const double x = to_float(state[i * kValueDim + j]);
      sums[j] += x * x;
    }
  }
  double sum = 0;
  for (const double s : sums) sum += s;
  return std::sqrt(sum);
}

template <class T, class S = State<T>>
Growth grow_as(const Stream& stream, const HeadRun& head, const Precision& precision) {
  std::array<T, kKeyDim> k{};
  std::array<T, kValueDim> v{}, o{};
  std::array<S, kKeyDim * kValueDim> state{};
  const T beta = input<T>(static_cast<float>(head.beta), precision);
  DeltaStep<T, S> p;
  p.shape = {.batch = 1, .tokens = 1, .heads = 1, .value_heads = 1, .key_dim = kKeyDim, .value_dim = kValueDim};
  p.rule = head.rule;
  p.q = p.k = View<const T, 3>::contiguous(k.data(), {1, 1, kKeyDim});
  p.v = View<const T, 3>::contiguous(v.data(), {1, 1, kValueDim});
  p.beta = View<const T, 2>::contiguous(&beta, {1, 1});
  p.state = View<S, 4>::contiguous(state.data(), {1, 1, kKeyDim, kValueDim});
  p.o = View<T, 3>::contiguous(o.data(), {1, 1, kValueDim});

  Growth growth;
  for (std::int64_t t = 0; t < stream.tokens && growth.not_finite == 0; ++t) {
    for (std::int64_t i = 0; i < kKeyDim; ++i) {
      k[i] = input<T>(key_element(stream, head.lambda, head.direction_at(t), i), precision);
    }
    for (std::int64_t j = 0; j < kValueDim; ++j) v[j] = input<T>(stream.values[t * kValueDim + j], precision);
    delta_step(p, {.implementation = "recurrent"});
    growth.last = norm(state);
    if (!(growth.last <= kGrowthBound) && growth.beyond == 0) growth.beyond = t + 1;
    if (std::isfinite(growth.last)) {
      growth.largest = std::max(growth.largest, growth.last);
    } else {
      growth.not_finite = t + 1;
    }
  }
  for (const S x : state) growth.state.push_back(to_float(x));
  return growth;
}

}  // namespace

Stream::Stream(std::int64_t tokens, std::uint64_t seed)
    : tokens(tokens), directions(tokens * kKeyDim), values(tokens * kValueDim) {
  Random key_numbers(seed, 0), value_numbers(seed, 1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::array<double, kKeyDim> direction;
    double squares = 0;
    for (double& x : direction) {
      x = key_numbers.normal();
      squares += x * x;
    }
    for (std::int64_t i = 0; i < kKeyDim; ++i) {
      directions[t * kKeyDim + i] = static_cast<float>(direction[i] / std::sqrt(squares));
    }
  }
  for (float& x : values) x = static_cast<float>(value_numbers.normal());
}

Growth grow(const Stream& stream, const HeadRun& head, const Precision& precision) {
  if (precision.bfloat16_state) return grow_as<bfloat16, bfloat16>(stream, head, precision);
  if (precision.bfloat16_inputs) return grow_as<bfloat16>(stream, head, precision);
  return grow_as<float>(stream, head, precision);
}

std::vector<double> reference_state(const Stream& stream, const HeadRun& head, bool bfloat16_inputs) {
  const Precision precision{.bfloat16_inputs = bfloat16_inputs};
  const std::int64_t tokens = stream.tokens;
  std::vector<double> k(tokens * kKeyDim), v, state(kKeyDim * kValueDim), o(tokens * kValueDim);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < kKeyDim; ++i) {
      k[t * kKeyDim + i] = input<double>(key_element(stream, head.lambda, head.direction_at(t), i), precision);
    }
  }
  for (const float x : stream.values) v.push_back(input<double>(x, precision));
  const double beta = input<double>(static_cast<float>(head.beta), precision);
  DeltaForward<double> p;
  p.shape = {.batch = 1, .tokens = tokens, .heads = 1, .value_heads = 1, .key_dim = kKeyDim, .value_dim = kValueDim};
  p.rule = head.rule;
  p.q = p.k = View<const double, 4>::contiguous(k.data(), {1, tokens, 1, kKeyDim});
  p.v = View<const double, 4>::contiguous(v.data(), {1, tokens, 1, kValueDim});
  p.beta = {&beta, {1, tokens, 1}, {0, 0, 0}};
  p.final_state = View<double, 4>::contiguous(state.data(), {1, 1, kKeyDim, kValueDim});
  p.o = View<double, 4>::contiguous(o.data(), {1, tokens, 1, kValueDim});
  delta_forward(p, {.implementation = "ref"});
  return state;
}

double eigenvalue(const Stream& stream, const HeadRun& head, const Precision& precision, std::int64_t direction) {
  double lambda = 0;
  for (std::int64_t i = 0; i < kKeyDim; ++i) {
    const double x = input<double>(key_element(stream, head.lambda, direction, i), precision);
    lambda += x * x;
  }
  if (head.rule.qk_l2norm) lambda /= lambda + kL2NormEpsilon;
  const double beta = input<double>(static_cast<float>(head.beta), precision);
  return 1 - head.rule.step.erase_scale * gain_alpha(head.rule.step, beta, lambda) * lambda;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

}  // namespace efla::experiments
