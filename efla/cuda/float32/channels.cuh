// What the kernels for a gate per key channel share (prepare_channel.cu, grads_channel.cu): a chunk is cut into blocks
// of 8 tokens. A decay is the product of the decays of its tokens, never an exponential of a difference of sums. So no
// decay loses digits, and a gate of −∞ gives zero.
#pragma once

#include "efla/cuda/float32/float32.h"

namespace efla::gpu {

inline constexpr int kFloat32Block = 8, kFloat32Blocks = kFloat32Tokens / kFloat32Block;

}  // namespace efla::gpu
