// The contenders: the operator's implementations and the eager peer. All of them use the same inputs and keep their
// outputs for comparison.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>

#include "bench/op/agreement.h"
#include "bench/op/eager_delta.h"
#include "efla/rule/problem.h"

namespace efla::bench {

enum class Operation { forward, forward_backward, decode };

// Returns "forward", "forward+backward" or "decode".
std::string name_of(Operation operation);

struct Inputs {
  at::Tensor q, k, v;        // [B, T, H, K], [B, T, H, V]
  at::Tensor beta;           // [B, T, H]
  at::Tensor dout;           // [B, T, H, V]
  at::Tensor initial_state;  // [B, H, K, V] float32 (float64 for float64): the state before a decode step
  at::Tensor g;              // [B, T, H, 1 or K] like initial_state; undefined without a decay

  DeltaShape shape() const;
  DeltaRule rule() const;
  // Returns views of the first heads.
  Inputs heads(std::int64_t count) const;
  Inputs to(at::ScalarType dtype) const;
};

// Returns equal numbers in every call: q, v, dout standard normal, ‖k‖ about 1, beta in (0.1, 0.9), g in (−0.1, 0);
// K = V = dim, batch 1.
Inputs random_inputs(std::int64_t tokens, std::int64_t heads, std::int64_t dim, at::ScalarType dtype, Decay decay);

// A function to time on fixed inputs. outputs() returns the outputs of its last run.
struct Contender {
  std::function<void()> run;
  std::function<Outputs()> outputs;
};

// implementation: a name for RunOptions. Outputs and saved states are allocated once, outside of run.
Contender efla_forward(const Inputs& inputs, const std::string& implementation);
Contender efla_forward_backward(const Inputs& inputs, const std::string& implementation);

// Decodes token 0. The state is written in place; runs use `copies` states in turn, so that many of them come from
// memory.
Contender efla_step(const Inputs& inputs, const std::string& implementation, std::int64_t copies);

Contender eager_forward(const Inputs& inputs, const EagerForm& form);
Contender eager_forward_backward(const Inputs& inputs, const EagerForm& form);
Contender eager_decode(const Inputs& inputs);

// Returns the float64 reference's outputs for the rounded inputs.
Outputs reference(const Inputs& inputs, Operation operation);

}  // namespace efla::bench
