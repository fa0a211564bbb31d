#include "experiments/common/plan.h"

#include <algorithm>

#include "efla/base/error.h"
#include "efla/io/toml.h"

namespace efla::experiments {
namespace {

using nlohmann::json;

constexpr const char* kAll = "all";

std::string scale_names(const json& plan) {
  std::string names;
  for (const auto& [name, value] : plan.items()) {
    if (value.is_object() && name != kAll) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

void require_values(const json& settings, const std::string& key) {
  if (!settings.contains(key)) return;
  const json& values = settings.at(key);
  if (values.empty()) throw Error("reproduce", key, "an empty list", "at least one value");
  for (auto value = values.begin(); value != values.end(); ++value) {
    if (std::find(values.begin(), value, *value) == value) continue;
    throw Error("reproduce", key, value->dump() + " twice", "each value once");
  }
}

// Keeps the tasks that tables show under these names, in their order, and drops the others.
void keep_tasks(json& settings, const json& names) {
  json kept = json::array();
  std::string all;
  std::vector<std::string> unknown = names;
  for (const json& task : settings.at("tasks")) {
    const std::string name = task.value("title", task.at("name").get<std::string>());
    all += (all.empty() ? "" : ", ") + name;
    std::erase(unknown, name);
    if (std::find(names.begin(), names.end(), name) != names.end()) kept.push_back(task);
  }
  if (!unknown.empty()) throw Error("reproduce", "tasks", "'" + unknown.front() + "'", "one of " + all);
  settings["tasks"] = kept;
}

}  // namespace

Plan::Plan(std::string_view toml, const std::string& study, const std::string& scale, const json& given)
    : study_(study) {
  const json plan = io::parse_toml(toml, study + "/plan.toml");
  title_ = plan.at("title");
  if (scale == kAll || !plan.contains(scale) || !plan.at(scale).is_object()) {
    throw Error("reproduce", "scale", "'" + scale + "'", "one of " + scale_names(plan));
  }
  settings_ = plan.value(kAll, json::object());
  settings_.merge_patch(plan.at(scale));
  if (given.is_object()) {
    require_values(given, "tasks");
    json others = given;
    others.erase("tasks");
    settings_.merge_patch(others);
    if (given.contains("tasks")) keep_tasks(settings_, given.at("tasks"));
  }
  settings_["scale"] = scale;
  for (const char* key : {"mixers", "seeds", "lr", "layers"}) require_values(settings_, key);
}

}  // namespace efla::experiments
