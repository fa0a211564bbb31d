// The problems of the delta rule's operators for rows of a mixer.
#pragma once

#include <cstdint>

#include "efla/base/view.h"
#include "efla/nn/layers/mixer_plan.h"
#include "efla/rule/problem.h"

namespace efla::nn {

// Where the inputs and outputs of B texts with T tokens each lie, in rows of float32.
struct MixerRows {
  std::int64_t texts = 1, tokens = 1;
  const float* qkv = nullptr;        // [B, T, channels]: q, k and v after the convolution; of several steps q alone
  std::int64_t text_stride = 0;      // floats from a text to the next in qkv
  const float* beta = nullptr;       // [B, T·n, HV]
  const float* decay = nullptr;      // [B, T, HV, 1 or K]; not read without a decay
  float* o = nullptr;                // [B, T, HV, V]
  const float* erase_key = nullptr;  // [B, T, H, K]; not read by a rule with one key
  const float *k = nullptr, *v = nullptr;  // [B, T·n, H, K] and [B, T·n, HV, V] of several steps per token
};

// Returns a view of states of the shape [count, HV, K, V].
inline View<float, 4> states_view(const MixerPlan& plan, float* first, std::int64_t count) {
  const auto& config = plan.config;
  return View<float, 4>::contiguous(first, {count, config.value_heads, config.key_dim, config.value_dim});
}

// Returns a DeltaForward or DeltaSteps of float32 without its states.
template <class Problem>
Problem mixer_problem(const MixerPlan& plan, const MixerRows& rows) {
  const auto& config = plan.config;
  const std::int64_t texts = rows.texts, tokens = rows.tokens, heads = config.value_heads, n = plan.steps();
  const auto heads_of = [&](std::int64_t first, std::int64_t count, std::int64_t dim) {
    return View<const float, 4>{
        rows.qkv + first, {texts, tokens, count, dim}, {rows.text_stride, plan.channels(), dim, 1}};
  };
  Problem p;
  p.shape = {texts, tokens * n, config.heads, heads, config.key_dim, config.value_dim};
  p.rule = plan.rule;
  p.q = heads_of(0, config.heads, config.key_dim);
  if (n == 1) {
    p.k = heads_of(plan.keys(), config.heads, config.key_dim);
    p.v = heads_of(2 * plan.keys(), heads, config.value_dim);
  } else {
    p.k = View<const float, 4>::contiguous(rows.k, {texts, tokens * n, config.heads, config.key_dim});
    p.v = View<const float, 4>::contiguous(rows.v, {texts, tokens * n, heads, config.value_dim});
  }
  p.beta = View<const float, 3>::contiguous(rows.beta, {texts, tokens * n, heads});
  if (plan.gate != Gate::none) {
    p.g = View<const float, 4>::contiguous(rows.decay, {texts, tokens, heads, plan.decays() / heads});
  }
  if (plan.rule.two_keys) {
    p.erase_key = View<const float, 4>::contiguous(rows.erase_key, {texts, tokens, config.heads, config.key_dim});
  }
  p.o = View<float, 4>::contiguous(rows.o, {texts, tokens, heads, config.value_dim});
  return p;
}

}  // namespace efla::nn
