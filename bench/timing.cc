#include "bench/timing.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <thread>

namespace efla::bench {
namespace {

constexpr double kSampleSeconds = 1e-3;
constexpr double kTurnSeconds = 0.1;
constexpr std::size_t kSamplesPerTurn = 20;
// Idle threads of OpenMP and OpenBLAS spin for a while before they sleep. The pause keeps the spinning out of the next
// function's samples.
constexpr std::chrono::milliseconds kSettle{80};

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Samples {
  std::vector<double> wall, cpu;
};

void sample(const std::function<void()>& function, int calls, Samples& samples) {
  const double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), wall = seconds(CLOCK_MONOTONIC);
  for (int i = 0; i < calls; ++i) function();
  samples.wall.push_back((seconds(CLOCK_MONOTONIC) - wall) / calls);
  samples.cpu.push_back((seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / calls);
}

// Returns the value below which this share of the values lies.
double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

}  // namespace

std::vector<Timing> take_turns(const std::vector<std::function<void()>>& functions, int rounds) {
  std::vector<Samples> all(functions.size());
  std::vector<int> calls;
  for (const auto& function : functions) {
    Samples warm_up;
    do {
      sample(function, 1, warm_up);
    } while (warm_up.wall.back() < kSampleSeconds && warm_up.wall.size() < kSamplesPerTurn);
    calls.push_back(static_cast<int>(std::clamp(std::ceil(kSampleSeconds / quantile(warm_up.wall, 0.0)), 1.0, 1e4)));
  }
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      std::this_thread::sleep_for(kSettle);
      const double end = seconds(CLOCK_MONOTONIC) + kTurnSeconds;
      for (std::size_t n = 0; n == 0 || (n < kSamplesPerTurn && seconds(CLOCK_MONOTONIC) < end); ++n) {
        sample(functions[i], calls[i], all[i]);
      }
    }
  }
  std::vector<Timing> timings;
  for (const Samples& s : all) {
    timings.push_back({quantile(s.wall, 0.5), quantile(s.wall, 0.0), quantile(s.wall, 0.9), quantile(s.cpu, 0.5),
                       static_cast<int>(s.wall.size())});
  }
  return timings;
}

}  // namespace efla::bench
