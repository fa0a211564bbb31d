// Rotary position embeddings in float64, one pair after the other.
#pragma once

#include "efla/rule/rope.h"

namespace efla::ref {

// Computes y (rule/rope.h) and rounds it once.
void rope(const RopeForward& problem);

}  // namespace efla::ref
