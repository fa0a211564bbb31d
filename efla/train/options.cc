#include "efla/train/options.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/io/json.h"

namespace efla::train {
namespace {

using nlohmann::json;

void require(bool good, const char* name, const json& got, const char* expected) {
  if (!good) throw Error("train", name, io::shown(got), expected);
}

}  // namespace

void validate(const TrainOptions& o) {
  require(o.epochs >= 1 && o.epochs <= 1'000'000, "epochs", o.epochs, "1 to 1000000");
  require(o.lr > 0.0 && o.lr <= 1.0, "lr", o.lr, "a number above 0 and at most 1");
  require(o.batch_size >= 1 && o.batch_size <= 65536, "batch-size", o.batch_size, "1 to 65536");
  require(o.weight_decay >= 0.0 && o.weight_decay <= 100.0, "weight-decay", o.weight_decay, "0 to 100");
  require(o.warmup >= 0.0 && o.warmup < 1.0, "warmup", o.warmup, "a part of all steps, at least 0 and below 1");
  require(o.clip >= 0.0 && std::isfinite(o.clip), "clip", o.clip, "a finite norm, or 0 for none");
}

std::string_view schedule_name(Schedule schedule) { return schedule == Schedule::cosine ? "cosine" : "constant"; }

Schedule schedule_from_name(std::string_view name) {
  if (name == "cosine") return Schedule::cosine;
  if (name == "constant") return Schedule::constant;
  throw Error("train", "schedule", "\"" + std::string(name) + "\"", "constant or cosine");
}

json to_json(const TrainOptions& o) {
  return {{"epochs", o.epochs},
          {"lr", o.lr},
          {"seed", o.seed},
          {"batch_size", o.batch_size},
          {"weight_decay", o.weight_decay},
          {"schedule", schedule_name(o.schedule)},
          {"warmup", o.warmup},
          {"clip", o.clip}};
}

TrainOptions train_options_from_json(const json& j) {
  TrainOptions o;
  o.epochs = j.at("epochs").get<std::int64_t>();
  o.lr = j.at("lr").get<double>();
  o.seed = j.at("seed").get<std::uint64_t>();
  o.batch_size = j.at("batch_size").get<std::int64_t>();
  o.weight_decay = j.at("weight_decay").get<double>();
  o.schedule = schedule_from_name(j.at("schedule").get<std::string>());
  o.warmup = j.at("warmup").get<double>();
  o.clip = j.at("clip").get<double>();
  return o;
}

namespace {

std::optional<Difference> difference_at(const std::string& path, const json& asked, const json& found) {
  if (asked.is_object() && found.is_object()) {
    const auto below = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
    for (const auto& [key, value] : asked.items()) {
      if (auto difference = difference_at(below(key), value, found.value(key, json()))) return difference;
    }
    for (const auto& [key, value] : found.items()) {
      if (asked.contains(key)) continue;
      if (auto difference = difference_at(below(key), json(), value)) return difference;
    }
    return std::nullopt;
  }
  if (asked == found) return std::nullopt;
  const auto shown = [](const json& value) { return value.is_null() ? "nothing" : value.dump(); };
  return Difference{path, shown(asked), shown(found)};
}

}  // namespace

std::optional<Difference> first_difference(const json& asked, const json& found) {
  return difference_at("", asked, found);
}

void require_same(const json& asked, const json& found, std::string_view operation, std::string_view where) {
  if (const auto difference = first_difference(asked, found)) {
    throw Error(std::string(operation), difference->field, difference->asked,
                difference->found + " as in " + std::string(where));
  }
}

}  // namespace efla::train
