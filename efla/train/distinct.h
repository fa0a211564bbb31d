// A check that the lists of a study share.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/base/error.h"

namespace efla::train {

// Throws Error about the option `name` for a value that is given twice.
template <class T>
void require_distinct(const char* name, const std::vector<T>& values) {
  for (auto value = values.begin(); value != values.end(); ++value) {
    if (std::find(values.begin(), value, *value) == value) continue;
    throw Error("reproduce", name, nlohmann::json(*value).dump() + " twice", "each value once");
  }
}

}  // namespace efla::train
