#pragma once

#include <map>
#include <string>
#include <vector>

namespace efla::bench {

// When a kernel of a GPU ran, in seconds.
struct KernelTime {
  std::string part;  // the part of a model's step to which the kernel belongs
  double begin = 0.0, end = 0.0;
};

// Returns the seconds of each part. Of the time in which kernels overlap, as they do if a kernel begins before the
// previous one has ended, the kernel that began first has all. So the sum is the time in which at least one kernel ran.
std::map<std::string, double> seconds_of_parts(std::vector<KernelTime> kernels);

}  // namespace efla::bench
