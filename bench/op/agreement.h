// The check before every time: a contender with wrong results gets no time.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

namespace efla::bench {

// Named results of a contender, for example o, final_state, dq.
using Outputs = std::vector<std::pair<std::string, at::Tensor>>;

// Returns the largest relative RMS error ‖got − want‖ / ‖want‖, in float64, of a correct result in the dtype.
double tolerance(at::ScalarType dtype);

struct Agreement {
  double error = 0;   // the largest over the outputs; NaN if got or want are non-finite
  std::string fault;  // "" if all agree; otherwise the output that differs and by how much
};

// Compares outputs of the same names and shapes. Infinities and NaN never agree, nor does an output that `want` lacks.
Agreement compare(const Outputs& got, const Outputs& want, double tolerance);

}  // namespace efla::bench
