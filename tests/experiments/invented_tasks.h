// A finished study of synthetic tasks with invented figures.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "experiments/plans.h"
#include "experiments/synthetic/report.h"

namespace efla::test {

// Two mixers on two tasks at three lengths (or one), one of the eight runs diverged.
inline experiments::Outcome invented_task_outcome(bool by_length = true,
                                                  const std::vector<std::string>& mixers = {"kda", "kda-exact"}) {
  experiments::Outcome outcome{{}, "efla reproduce extrapolation", {{"cpu", "a processor"}}};
  int n = 0;
  for (const std::string task : {"mqar", "stack"}) {
    for (const auto& mixer : mixers) {
      for (const int seed : {1, 2}) {
        const bool diverged = n == 3 && seed == 2;
        nlohmann::ordered_json run{{"name", task + "-" + mixer + "-seed" + std::to_string(seed)},
                                   {"task", task},
                                   {"setting", ""},
                                   {"mixer", mixer},
                                   {"lr", 0.003},
                                   {"weight_decay", 0.01},
                                   {"seed", seed},
                                   {"parameters", 12345},
                                   {"steps", 200},
                                   {"train_seconds", 3.5},
                                   {"sequences_per_second", 3657.1},
                                   {"diverged", diverged},
                                   {"tests", nlohmann::ordered_json::array()},
                                   {"curve", nlohmann::ordered_json::array()}};
        for (const int step : {100, 200}) {
          run["curve"].push_back({{"step", step}, {"loss", 2.0 - 0.005 * step}, {"accuracy", 0.004 * step}});
        }
        for (const int length : {64, 128, 256}) {
          if (diverged || (!by_length && length > 64)) continue;
          run["tests"].push_back({{"length", length}, {"accuracy", 0.9 - 0.001 * length + 0.01 * n + 0.02 * seed}});
        }
        outcome.runs.push_back(run);
      }
      ++n;
    }
  }
  return outcome;
}

inline report::Report invented_task_report(bool by_length = true) {
  const experiments::Plan plan =
      by_length ? experiments::Plan(experiments::extrapolation_plan(), "extrapolation", "small", {})
                : experiments::Plan(experiments::mad_plan(), "mad", "tiny", {});
  return experiments::synthetic_report(plan, invented_task_outcome(by_length));
}

}  // namespace efla::test
