// Products and mixer steps one after the other in one kernel: all layers of a decode step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "efla/rule/linear.h"
#include "efla/rule/mixer_step.h"

namespace efla::gpu {

// A part of a list of operators as the kernel reads it.
struct alignas(16) StepOp {
  enum class Kind : int { linear, mixer };
  Kind kind = Kind::linear;
  bool awaited = false, residual_awaited = false;  // whether operators before it write its inputs, and its residual
  int spans = 0, first_tile = 0, end_tile = 0;
  float* exchange = nullptr;  // where its outputs also go, in the order of its output
  LinearForward linear = {};
  MixerStep mixer = {};
};

// Operators that run one after the other, for the current device.
class LayersStep {
 public:
  // Whether the kernel takes an operator that `linear` or `mixer_step` takes. All products have weights of one type.
  static bool takes(const LinearForward& problem);
  static bool takes(const MixerStep& problem);

  void add(const LinearForward& problem);
  void add(const MixerStep& problem);

  // The bytes of device memory that the kernel needs, and what they are at first, at `device`: the operators, and the
  // places of what they write for each other.
  std::size_t bytes() const;
  std::vector<std::byte> image(void* device) const;

  // Runs the operators. An operator's output is complete when the kernel has ended.
  void run(void* device, cudaStream_t stream) const;

 private:
  std::vector<StepOp> ops_;
  std::int64_t exchange_floats_ = 0;
  int rows_ = 1;
  int slice_columns_ = 0;
  bool narrow_ = true;
};

}  // namespace efla::gpu
