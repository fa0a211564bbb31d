#include "efla/io/gzip.h"

#include <utility>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void gzip(io::ByteView bytes) {
  constexpr std::size_t kGenerous = std::size_t{1} << 22;
  io::Bytes out;
  const auto unpack = [&](std::size_t bound) {
    return accepts([&] { out = io::gunzip(bytes, "input", bound); }, bytes.size());
  };
  if (!unpack(kGenerous)) return;
  const auto whole = std::exchange(out, {});
  require(whole.size() <= kGenerous, "no more than the bound");
  require(unpack(whole.size()) && out == whole, "the same within a bound that just fits");
  if (!whole.empty()) require(!unpack(whole.size() - 1), "an error where one byte too many comes out");
}

}  // namespace efla::fuzz
