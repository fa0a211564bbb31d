// metrics.jsonl of a run's folder: a line an event, in the order of the steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/io/json.h"

namespace efla::train {

inline constexpr const char* kMetricsFile = "metrics.jsonl";

// Lines {"event": …, "step": …, …, "seconds": …}. seconds is the time spent in steps.
class Metrics {
 public:
  // Drops lines beyond `step`: those steps will be repeated, the process having died after its last checkpoint. Throws
  // IoError.
  Metrics(const std::filesystem::path& path, std::int64_t step);

  double seconds() const { return seconds_; }  // of the last line
  // The step of the last line of an event, 0 for none.
  std::int64_t last_step(const std::string& event) const;

  void write(const nlohmann::ordered_json& line);
  void sync() { writer_.sync(); }

 private:
  const std::filesystem::path& kept(const std::filesystem::path& path, std::int64_t step);
  void note(const nlohmann::ordered_json& line);

  double seconds_ = 0.0;
  std::map<std::string, std::int64_t> last_steps_;
  io::JsonLinesWriter writer_;
};

}  // namespace efla::train
