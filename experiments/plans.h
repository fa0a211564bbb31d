// The plans of the studies, compiled in from their plan.toml.
#pragma once

#include <string_view>

namespace efla::experiments {

std::string_view extrapolation_plan();
std::string_view mad_plan();
std::string_view mqar_plan();
std::string_view smnist_plan();
std::string_view state_tracking_plan();
std::string_view table1_plan();

}  // namespace efla::experiments
