// A mixer's part of a decode step: validates a problem, chooses a row of the operation's list (implementation.h) and
// runs it.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/mixer_step.h"

namespace efla {

// Throws Error for a bad argument or an implementation that refuses the problem.
Choice mixer_step(const MixerStep& problem, const RunOptions& options = {});

// Returns whether an implementation takes the problem. Throws Error for a bad argument.
bool takes_mixer_step(const MixerStep& problem, const RunOptions& options = {});

}  // namespace efla
