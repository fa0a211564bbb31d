// The plan of a study: a TOML file with a table per scale, compiled into the program.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace efla::experiments {

// Reads plan.toml: the text under its key `title`, and the settings of a scale: the table [all], overridden by the
// table [scale] and then by `given`, where it is an object; its list `tasks` has the names of the tasks to keep. Throws
// Error(reproduce) for a scale or a task that the plan does not have, and for one of the lists mixers, seeds, lr,
// layers, tasks that is empty or has a value twice.
class Plan {
 public:
  Plan(std::string_view toml, const std::string& study, const std::string& scale, const nlohmann::json& given);

  const std::string& study() const { return study_; }
  const std::string& title() const { return title_; }
  const nlohmann::json& settings() const { return settings_; }

 private:
  std::string study_, title_;
  nlohmann::json settings_;
};

}  // namespace efla::experiments
