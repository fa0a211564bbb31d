// Results of a study of synthetic tasks with invented figures.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace efla::test {

// Two mixers on two tasks at three lengths (or one), one of the runs diverged.
inline nlohmann::json synthetic_study_results(bool by_length = true) {
  using nlohmann::json;
  json scores = json::array(), runs = json::array();
  int n = 0;
  for (const std::string task : {"mqar", "stack"}) {
    for (const std::string mixer : {"kda", "kda-exact"}) {
      json points = json::array();
      for (const int length : {64, 128, 256}) {
        if (!by_length && length > 64) continue;
        points.push_back({{"length", length},
                          {"mean", 0.9 - 0.001 * length + 0.01 * n},
                          {"std", 0.02},
                          {"paper", mixer == "kda" ? json(0.987) : json()},
                          {"paper_std", nullptr}});
      }
      scores.push_back({{"task", task},
                        {"mixer", mixer},
                        {"settings", 1},
                        {"seeds", 2},
                        {"runs", 2},
                        {"diverged", n == 3 ? 1 : 0},
                        {"lr", 0.003},
                        {"weight_decay", 0.01},
                        {"accuracy", points}});
      for (const int seed : {1, 2}) {
        const bool diverged = n == 3 && seed == 2;
        json run{{"name", task + "-" + mixer + "-seed" + std::to_string(seed)},
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
                 {"tests", json::array()},
                 {"curve", json::array()}};
        for (const int step : {100, 200}) {
          run["curve"].push_back({{"step", step}, {"loss", 2.0 - 0.005 * step}, {"accuracy", 0.004 * step}});
        }
        if (!diverged) run["tests"].push_back({{"length", 64}, {"accuracy", 0.8}});
        runs.push_back(run);
      }
      ++n;
    }
  }
  return {{"schema", 1},
          {"study", by_length ? "extrapolation" : "mad"},
          {"scale", "small"},
          {"command", "efla reproduce extrapolation"},
          {"environment", {{"cpu", "a processor"}}},
          {"scores", scores},
          {"eigenvalues", {{"kda", {{0.0, 1.0}, {1.0, -1.0}}}}},
          {"runs", runs}};
}

}  // namespace efla::test
