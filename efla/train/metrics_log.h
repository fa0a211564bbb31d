// What a run writes about its course: metrics.jsonl, one line per event in the order of the steps, and the same numbers
// for TensorBoard.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "efla/io/event_file.h"
#include "efla/io/json.h"

namespace efla::train {

inline constexpr const char* kMetricsFile = "metrics.jsonl";

class MetricsLog {
 public:
  // Drops the lines beyond `step` in the run's folder: the process died after its last checkpoint, and those steps will
  // be repeated. Throws IoError, also where a file with lines ends before `step`, because the lines between are lost.
  MetricsLog(const std::filesystem::path& folder, std::int64_t step);

  double seconds() const { return seconds_; }  // of the last line: the time spent in steps

  // Returns the last line of an event.
  std::optional<nlohmann::ordered_json> last(const std::string& event) const;

  // Adds a line {"event", "step", …, "seconds"}, where "seconds" has grown by `seconds`. The other floating-point
  // numbers of the line become TensorBoard's GROUP/NAME.
  void write(nlohmann::ordered_json line, const std::string& group, double seconds = 0.0);

  void sync() { writer_.sync(); }

 private:
  const std::filesystem::path& kept(const std::filesystem::path& path, std::int64_t step);
  void note(const nlohmann::ordered_json& line);

  double seconds_ = 0.0;
  std::map<std::string, nlohmann::ordered_json> last_;
  io::JsonLinesWriter writer_;
  io::EventFile events_;
};

}  // namespace efla::train
