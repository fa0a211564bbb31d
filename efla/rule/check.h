// Checks of sizes, shapes and cu_seqlens, of which the functions `validate` consist.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "efla/base/device.h"
#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/base/view.h"

namespace efla {

// Throws Error unless the size is from `least` to `most`.
inline void check_size(const char* operation, const char* argument, std::int64_t size, std::int64_t least,
                       std::int64_t most = std::numeric_limits<std::int32_t>::max()) {
  if (size < least || size > most) {
    const std::string expected = std::to_string(least);
    throw Error(operation, argument, std::to_string(size),
                least == most ? expected : expected + " to " + std::to_string(most));
  }
}

enum class Presence { required, optional };

// Throws Error unless the view has the expected shape. An optional view may be absent.
template <class T, int Rank>
void check_view(const char* operation, const char* name, const View<T, Rank>& view,
                const std::type_identity_t<std::array<std::int64_t, Rank>>& expected,
                Presence presence = Presence::required) {
  if (!view) {
    if (presence == Presence::optional) return;
    throw Error(operation, name, "nothing", "a tensor of shape " + shape_text(expected.data(), Rank));
  }
  if (view.extent != expected) {
    throw Error(operation, name, "shape " + shape_text(view.extent.data(), Rank),
                "shape " + shape_text(expected.data(), Rank));
  }
}

// Checks cu_seqlens [N + 1] of N = `sequences` sequences that are packed into one batch entry of `tokens` tokens. The
// values are read only if they are in the CPU's memory.
inline void check_cu_seqlens(const char* operation, const View<const std::int64_t, 1>& cu_seqlens,
                             std::int64_t sequences, std::int64_t batch, std::int64_t tokens, const Device& device) {
  check_size(operation, "packed sequence count N", sequences, 1);
  if (batch != 1) throw Error(operation, "batch size B", std::to_string(batch), "1 with cu_seqlens");
  check_view(operation, "cu_seqlens", cu_seqlens, {sequences + 1});
  if (!device.is_cpu()) return;
  const auto fail = [&](std::int64_t i, const std::string& expected) {
    throw Error(operation, "cu_seqlens[" + std::to_string(i) + "]", std::to_string(cu_seqlens(i)), expected);
  };
  if (cu_seqlens(0) != 0) fail(0, "0");
  for (std::int64_t i = 1; i <= sequences; ++i) {
    if (cu_seqlens(i) < cu_seqlens(i - 1)) {
      fail(i, "at least cu_seqlens[" + std::to_string(i - 1) + "] = " + std::to_string(cu_seqlens(i - 1)));
    }
  }
  if (cu_seqlens(sequences) != tokens) fail(sequences, "T = " + std::to_string(tokens));
}

}  // namespace efla
