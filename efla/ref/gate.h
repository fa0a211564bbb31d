// The gated product in float64.
#pragma once

#include "efla/rule/gate.h"

namespace efla::ref {

void gate(const GateForward& problem);

}  // namespace efla::ref
