// Products and mixer's steps one after the other in one kernel: all layers of a decode step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "efla/rule/linear.h"
#include "efla/rule/mixer_step.h"

namespace efla::gpu {

// A part of a list of operators as the kernel reads it.
struct alignas(16) StepOp {
  enum class Kind : int { linear, mixer };
  Kind kind = Kind::linear;
  bool after_barrier = true;  // it reads what the operators before it write
  int spans = 0, first_tile = 0, end_tile = 0;
  LinearForward linear = {};
  MixerStep mixer = {};
};

// Operators that run one after the other, for the current device.
class LayersStep {
 public:
  // Returns what of an operator the kernel does not take, as a sentence, or "". All products have weights of one type.
  static std::string refusal(const LinearForward& problem);
  static std::string refusal(const MixerStep& problem);

  void add(const LinearForward& problem);
  void add(const MixerStep& problem);

  // The bytes that the kernel reads, and the counters that it keeps after them, zeros at first.
  const std::vector<StepOp>& ops() const { return ops_; }
  static constexpr std::size_t kCounterBytes = 8;

  // Runs the operators, of which `ops` is a copy in the device's memory.
  void run(const StepOp* ops, unsigned* counters, cudaStream_t stream) const;

 private:
  std::vector<StepOp> ops_;
  int rows_ = 1;
  int slice_columns_ = 0;
  bool narrow_ = true;
};

}  // namespace efla::gpu
