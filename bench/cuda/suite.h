// The times of the delta rule's kernels on a GPU, at the sizes at which other projects' kernels were timed. Every
// result is checked before it is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace efla::bench::cuda {

struct GpuOptions {
  std::string filter;    // only cases whose name contains this text
  int repeats = 30;      // of graph replays, and of calls outside of a graph
  bool scaling = false;  // T from 1024 to 262144 in place of the peers' sizes
  std::string commit;    // of the program, for the results
};

// Gets one JSON object per result.
using GpuWrite = std::function<void(const std::string& line)>;

// Times the cases. Throws Error where there is no GPU and where no case's name contains the filter, and
// std::runtime_error after the last case where a case computed wrong results, which therefore got no time.
void time_gpu(const GpuOptions& options, const GpuWrite& write);

}  // namespace efla::bench::cuda
