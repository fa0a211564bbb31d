// The decay D_t of S̃_t = D_t S_{t−1}, applied before the error is taken.
#pragma once

namespace efla {

// none: D_t = I. A scalar decay per head (Gated DeltaNet) and one per key channel (Kimi Delta Attention) are rows to
// come.
enum class Decay { none };

}  // namespace efla
