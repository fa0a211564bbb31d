// Times the kernels of efla/cuda at the sizes at which kernels of other projects were timed. Every result is checked
// before it is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace efla::bench::cuda {

struct GpuOptions {
  std::string filter;    // only cases whose name contains this text
  int repeats = 30;      // graph replays, and calls outside of a graph, per case
  bool scaling = false;  // T from 1024 to 262144 instead of the peers' sizes
  std::string commit;    // of the program, for the results
  std::string gpu;       // its name, for the results
};

// Receives one JSON object per result.
using GpuWrite = std::function<void(const std::string& line)>;

// Times the cases on the current GPU. Throws Error if no case's name contains the filter. Throws std::runtime_error
// after the last case if a case computed wrong results; such a case gets no time.
void time_gpu(const GpuOptions& options, const GpuWrite& write);

}  // namespace efla::bench::cuda
