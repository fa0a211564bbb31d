// Results as a table on the standard output and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/suite.h"

namespace efla::bench {

// One object for every contender, without what is the same for the whole run.
std::vector<nlohmann::ordered_json> to_json(const Measured& measured);

void print_case(const Measured& measured);

// One line for every size, operation and contender; a column for every T.
void print_scaling(const std::vector<Measured>& all);

}  // namespace efla::bench
