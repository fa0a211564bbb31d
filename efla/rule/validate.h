// Checks a problem before any kernel sees it.
#pragma once

#include "efla/base/device.h"
#include "efla/rule/problem.h"

namespace efla {

// Throws Error that names the operation, the first wrong argument, what it got and what it expected. T is float,
// bfloat16 or double. `device` has the problem's tensors: the values of cu_seqlens and slots are checked on the CPU
// alone, because the host cannot read them elsewhere.
template <class T>
void validate(const DeltaForward<T>& problem, const Device& device = {});
template <class T>
void validate(const DeltaBackward<T>& problem, const Device& device = {});
template <class T, class S>
void validate(const DeltaStep<T, S>& problem, const Device& device = {});
template <class T, class S>
void validate(const DeltaSteps<T, S>& problem, const Device& device = {});

// Checks a shape and a rule alone, for a caller that has no views yet.
void validate(const char* operation, const DeltaShape& shape, const DeltaRule& rule);

// Checks a shape alone, in the same way.
void validate(const char* operation, const DeltaShape& shape);

}  // namespace efla
