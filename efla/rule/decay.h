// The decay D_t in S̃_t = D_t S_{t−1}, which is applied before the error is computed.
#pragma once

#include <string_view>

namespace efla {

// D_t is the identity (none), e^g with one g per value head (scalar gate: Gated DeltaNet) or diag(e^g) with one g per
// value head and key channel (channel gate: Kimi Delta Attention). g is the natural logarithm of the decay. All known
// mixers produce g ≤ 0; a positive g is allowed and lets the state grow.
enum class Decay { none, scalar, channel };

constexpr std::string_view name_of(Decay decay) {
  return decay == Decay::none ? "none" : decay == Decay::scalar ? "scalar" : "channel";
}

}  // namespace efla
