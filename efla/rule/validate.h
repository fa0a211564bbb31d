// Checks a problem before any kernel sees it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "efla/rule/problem.h"

namespace efla {

// Throw Error naming the operation, the first argument that is wrong, what was got and what was expected. T is float,
// bfloat16 or double.
template <class T>
void validate(const DeltaForward<T>& problem);
template <class T>
void validate(const DeltaBackward<T>& problem);
template <class T, class S>
void validate(const DeltaStep<T, S>& problem);

// The same of a shape alone.
void validate(const char* operation, const DeltaShape& shape);

// Of `names`, the one with the smallest edit distance to `name`, which is at most 1 for one that begins with it.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

// "[2, 16, 4, 64]".
std::string shape_text(const std::int64_t* extent, int rank);

}  // namespace efla
