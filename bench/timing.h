// Timing by turns: A B A B …, so that a change in the machine's speed meets every contender alike.
#pragma once

#include <functional>
#include <vector>

namespace efla::bench {

// Seconds a call.
struct Timing {
  double median = 0, min = 0, p90 = 0;
  double cpu_median = 0;  // processor time of the whole process
  int samples = 0;
};

// Every function has a turn in each of `rounds` rounds, after warm-up. A turn takes one or more samples, for about 0.1
// s or one call; a sample is as many calls as last a millisecond.
std::vector<Timing> take_turns(const std::vector<std::function<void()>>& functions, int rounds);

}  // namespace efla::bench
