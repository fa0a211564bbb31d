#include "efla/train/training_memory.h"

#include "efla/base/memory.h"

namespace efla::train {

void require_training_memory(const char* operation, const char* argument, double parameters, torch::Device device,
                             int processes) {
  if (!device.is_cpu()) return;
  // In float32: parameters and gradient, and AdamW's two moments, which the processes distribute among them.
  const double bytes_per_parameter = 8.0 + 8.0 / processes;
  require_memory(operation, argument, "parameters, their gradient and the optimiser's moments",
                 bytes_per_parameter * parameters);
}

}  // namespace efla::train
