// The gate before every time: a contender that answers wrongly gets none.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

namespace efla::bench {

// Named results of a contender, for example o, final_state, dq.
using Outputs = std::vector<std::pair<std::string, at::Tensor>>;

// The largest relative RMS error ‖got − want‖ / ‖want‖, in float64, that a correct result in the dtype may have.
double tolerance(at::ScalarType dtype);

struct Agreement {
  double error = 0;   // the largest over the outputs; NaN where got or want are not finite
  std::string fault;  // "" if all agree; else which output does not and by how much
};

// Compares outputs of the same names and shapes. Infinities and NaN never agree, nor does an output that `want` lacks.
Agreement compare(const Outputs& got, const Outputs& want, double tolerance);

}  // namespace efla::bench
