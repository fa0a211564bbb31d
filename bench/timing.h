// Timing in interleaved runs, A B A B …, so that a change of the machine's speed affects every contender.
#pragma once

#include <functional>
#include <vector>

namespace efla::bench {

// Seconds per call.
struct Timing {
  double median = 0, min = 0, p90 = 0;
  double cpu_median = 0;  // processor time of the whole process
  int samples = 0;
};

// Times every function in each of `rounds` rounds, after a warm-up. In a round each function takes at most 20 samples
// in about 0.1 s, and at least one. A sample is as many calls as take about a millisecond.
std::vector<Timing> take_turns(const std::vector<std::function<void()>>& functions, int rounds);

}  // namespace efla::bench
