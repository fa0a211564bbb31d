// The report on the study of digits: the panels of the paper's figures 1 and 2, and efla against deltanet.
#pragma once

#include "experiments/common/study.h"

namespace efla::experiments {

// Returns the report. settings: of smnist/plan.toml, with data, data_digest, train_images and test_images as they were.
report::Report digit_report(const std::string& title, const nlohmann::json& settings, const Outcome& outcome);

}  // namespace efla::experiments
