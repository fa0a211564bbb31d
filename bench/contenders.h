// What is timed: the operator's implementations and the eager peer, each on the same inputs and with its outputs kept
// for comparison.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>

#include "bench/agreement.h"
#include "bench/eager_delta.h"
#include "efla/rule/problem.h"

namespace efla::bench {

enum class Operation { forward, forward_backward, decode };

// "forward", "forward+backward", "decode".
std::string name_of(Operation operation);

struct Inputs {
  at::Tensor q, k, v;        // [B, T, H, K], [B, T, H, V]
  at::Tensor beta;           // [B, T, H]
  at::Tensor dout;           // [B, T, H, V]
  at::Tensor initial_state;  // [B, H, K, V] float32 (float64 for float64): what a decode step starts from
  at::Tensor g;              // [B, T, H, 1 or K] like initial_state; undefined without a decay

  DeltaShape shape() const;
  DeltaRule rule() const;
  // The first heads alone, as views.
  Inputs heads(std::int64_t count) const;
  Inputs to(at::ScalarType dtype) const;
};

// q, v, dout standard normal, ‖k‖ about 1, beta in (0.1, 0.9), g in (−0.1, 0); K = V = dim, batch 1. The same numbers
// every time.
Inputs random_inputs(std::int64_t tokens, std::int64_t heads, std::int64_t dim, at::ScalarType dtype, Decay decay);

// Something to time on fixed inputs. outputs() is of the last run.
struct Contender {
  std::function<void()> run;
  std::function<Outputs()> outputs;
};

// implementation: a name that RunOptions takes. Outputs and saved states are allocated once, outside of run.
Contender efla_forward(const Inputs& inputs, const std::string& implementation);
Contender efla_forward_backward(const Inputs& inputs, const std::string& implementation);

// Decodes token 0. The state is written in place; `copies` of it are used in turn, so that with many of them each
// comes from memory.
Contender efla_step(const Inputs& inputs, const std::string& implementation, std::int64_t copies);

Contender eager_forward(const Inputs& inputs, const EagerForm& form);
Contender eager_forward_backward(const Inputs& inputs, const EagerForm& form);
Contender eager_decode(const Inputs& inputs);

// What the float64 reference makes of the inputs, as they are rounded.
Outputs reference(const Inputs& inputs, Operation operation);

}  // namespace efla::bench
