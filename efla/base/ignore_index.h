// The target of a position that no loss and no accuracy counts.
#pragma once

#include <cstdint>

namespace efla {

inline constexpr std::int32_t kIgnoreIndex = -100;  // PyTorch's default of ignore_index

}  // namespace efla
