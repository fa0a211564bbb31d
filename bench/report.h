// Prints results as tables and converts them to JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/op/suite.h"

namespace efla::bench {

// Returns one object per contender, without the fields of the whole run.
std::vector<nlohmann::ordered_json> to_json(const Measured& measured);

void print_case(const Measured& measured);

// Prints one line per size, operation and contender, with a column per T.
void print_scaling(const std::vector<Measured>& all);

}  // namespace efla::bench
