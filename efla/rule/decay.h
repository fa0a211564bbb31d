// The decay D_t of S̃_t = D_t S_{t−1}, applied before the error is taken.
#pragma once

#include <string_view>

namespace efla {

// D_t is the identity, e^g with one g per head (Gated DeltaNet), or diag(e^g) with one g per key channel (Kimi Delta
// Attention). g, the natural logarithm of the decay, is at most 0 in every gate in use; a larger one is computed all
// the same and lets the state grow.
enum class Decay { none, scalar, channel };

constexpr std::string_view name_of(Decay decay) {
  return decay == Decay::none ? "none" : decay == Decay::scalar ? "scalar" : "channel";
}

}  // namespace efla
