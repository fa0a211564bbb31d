// Where a program's time goes, per operator, from LibTorch's own profile of the operators that it runs.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace efla::bench {

// Returns the seconds of all threads in each operator of LibTorch and of efla while `run` runs, without the operators
// that this operator calls, the longest first. Names are LibTorch's ("aten::mm"); the name of a backward
// function is its class.
std::vector<std::pair<std::string, double>> op_times(const std::function<void()>& run);

// Returns the part of a model's step to which an operator belongs, for example "matrix products".
std::string part_of(const std::string& op);

}  // namespace efla::bench
