// A mixer's decode step in float64, one element after the other.
#pragma once

#include "efla/rule/mixer_step.h"

namespace efla::ref {

// Computes o and updates states and history (rule/mixer_step.h). Rounds each number once.
void mixer_step(const MixerStep& problem);

}  // namespace efla::ref
