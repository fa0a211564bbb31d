// A mixer's part of a decode step: validates a problem, chooses a row of the operation's list (implementation.h) and
// runs it. docs/ops/mixer_step.md describes the operation.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/mixer_step.h"

namespace efla {

// Computes o of rule/mixer_step.h and updates history and states. On the CPU only "ref" takes it, by name. Throws Error
// for a bad argument or if no implementation takes the problem, and CudaError for failures on a GPU.
Choice mixer_step(const MixerStep& problem, const RunOptions& options = {});

// Returns whether an implementation takes the problem. Throws Error for a bad argument.
bool takes_mixer_step(const MixerStep& problem, const RunOptions& options = {});

}  // namespace efla
