// Runs kernels of efla/cuda for the rows of the lists of implementations (implementation.h). Included only if the build
// has these kernels.
#pragma once

#include <cstddef>
#include <memory>

#include "efla/cuda/delta.h"
#include "efla/cuda/device.h"
#include "efla/ops/context.h"

namespace efla {

// Calls f(workspace, stream) on the context's device. The workspace has workspace_bytes bytes and lives as long as the
// kernels that f enqueues. Throws CudaError, or what context.allocate throws.
template <class F>
void call_on_gpu(const ExecutionContext& context, std::size_t workspace_bytes, F&& f) {
  const gpu::OnDevice current(context.device.index);
  std::shared_ptr<void> memory;
  if (workspace_bytes > 0) {
    memory = context.allocate != nullptr ? context.allocate(workspace_bytes, context)
                                         : gpu::allocate_on_stream(workspace_bytes, context.stream);
  }
  f(gpu::Workspace{memory.get(), workspace_bytes}, context.stream);
}

}  // namespace efla
