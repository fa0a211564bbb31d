// Checks a problem before any kernel sees it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "efla/base/device.h"
#include "efla/rule/problem.h"

namespace efla {

// Throws Error that names the operation, the first wrong argument, what it got and what it expected. T is float,
// bfloat16 or double. `device` has the problem's tensors: the values of cu_seqlens are checked on the CPU alone,
// because the host cannot read them elsewhere.
template <class T>
void validate(const DeltaForward<T>& problem, const Device& device = {});
template <class T>
void validate(const DeltaBackward<T>& problem, const Device& device = {});
template <class T, class S>
void validate(const DeltaStep<T, S>& problem);

// Checks a shape and a rule alone, for a caller that has no views yet.
void validate(const char* operation, const DeltaShape& shape, const DeltaRule& rule);

// Checks a shape alone, in the same way.
void validate(const char* operation, const DeltaShape& shape);

// Returns the name of `names` with the smallest edit distance to `name`. A name that starts with `name` has at most
// distance 1.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

// Returns a shape as text, such as "[2, 16, 4, 64]".
std::string shape_text(const std::int64_t* extent, int rank);

}  // namespace efla
