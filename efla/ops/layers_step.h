// Products and mixer steps that run one after the other, each on what those before it wrote: the layers of a decode
// step. On a Hopper GPU one kernel computes the whole list.
#pragma once

#include <memory>

#include "efla/ops/context.h"
#include "efla/rule/linear.h"
#include "efla/rule/mixer_step.h"

namespace efla {

class LayersStep {
 public:
  explicit LayersStep(const ExecutionContext& context);
  ~LayersStep();
  LayersStep(const LayersStep&) = delete;
  LayersStep& operator=(const LayersStep&) = delete;

  // Add an operator, or return false where no kernel takes it in a list. All products have weights of one type and as
  // many rows. Throw Error for a bad argument.
  bool add(const LinearForward& problem);
  bool add(const MixerStep& problem);

  // Ends the list: brings it to the device's memory, and waits for that. Throws CudaError.
  void finish();
  // Enqueues the operators on the context's stream.
  void run(const ExecutionContext& context) const;

 private:
  struct List;
  std::unique_ptr<List> list_;
};

}  // namespace efla
