// The report on a study of synthetic tasks.
#pragma once

#include "experiments/common/plan.h"
#include "experiments/common/study.h"

namespace efla::experiments {

// Returns accuracies beside the papers' figures, by length and during training, and eigenvalues where the plan asks for
// them.
report::Report synthetic_report(const Plan& plan, const Outcome& outcome);

}  // namespace efla::experiments
