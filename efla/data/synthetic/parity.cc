// Parity: counting modulo two, the simplest task that needs a negative eigenvalue.
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

Task parity(const Parameters& parameters) {
  whole("parity", parameters, "length", 1);
  return modular_counting({{"length", parameters.at("length")}, {"modulus", 2}});
}

}  // namespace efla::data::synthetic
