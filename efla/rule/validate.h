// Checks a problem before any kernel sees it.
#pragma once

#include "efla/base/device.h"
#include "efla/rule/problem.h"

namespace efla {

// Throws Error that names the operation, the first wrong argument, its value and what was expected. T is float,
// bfloat16, float16 or double. The problem's tensors lie on `device`. The values of cu_seqlens, slots and kept are
// checked only on the CPU, because the host cannot read the memory of a GPU.
template <class T>
void validate(const DeltaForward<T>& problem, const Device& device = {});
template <class T>
void validate(const DeltaBackward<T>& problem, const Device& device = {});
template <class T, class S>
void validate(const DeltaStep<T, S>& problem, const Device& device = {});
template <class T, class S>
void validate(const DeltaSteps<T, S>& problem, const Device& device = {});

// Throws Error for a bad shape or rule, for a caller that has no views yet.
void validate(const char* operation, const DeltaShape& shape, const DeltaRule& rule);

// Throws Error for a bad shape.
void validate(const char* operation, const DeltaShape& shape);

// Throws Error for a bad shape or rule of decode steps of 1 to most_tokens tokens per batch entry.
void validate_step(const char* operation, const DeltaShape& shape, const DeltaRule& rule, std::int64_t most_tokens = 1);

}  // namespace efla
