// Parity: modular counting modulo two, the simplest task that needs an eigenvalue below zero.
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

Task parity(const Parameters& parameters) {
  whole("parity", parameters, "length", 1);
  return modular_counting({{"length", parameters.at("length")}, {"modulus", 2}});
}

}  // namespace efla::data::synthetic
