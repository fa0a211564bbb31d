// Where a program's time goes, operator by operator, from LibTorch's own record of the operators that it runs.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace efla::bench {

// Seconds of all threads in each operator of LibTorch and of ours while `run` runs, without the operators that it
// calls, the longest first. Names are LibTorch's ("aten::mm"); a backward function's is its class's.
std::vector<std::pair<std::string, double>> op_times(const std::function<void()>& run);

// The part of a model's step that an operator is counted to, for example "matrix products".
std::string part_of(const std::string& op);

}  // namespace efla::bench
