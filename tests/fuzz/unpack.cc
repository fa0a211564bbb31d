#include "efla/io/unpack.h"

#include <algorithm>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

constexpr std::size_t kGenerous = std::size_t{1} << 20;

// What comes out of the bytes given `step` at a time, up to a bound.
io::Bytes unpacked(io::ByteView bytes, std::size_t step) {
  const auto unpacker = io::make_unpacker(io::packing_of(bytes), "input");
  io::Bytes all, buffer(1 << 12);
  while (all.size() < kGenerous) {
    auto part = bytes.first(std::min(step, bytes.size()));
    const auto before = part.size();
    const auto count = unpacker->unpack(part, before == bytes.size(), buffer);
    require(count <= buffer.size() && part.size() <= before, "no more than there is room for");
    bytes = bytes.subspan(before - part.size());
    all.insert(all.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
    if (count == 0 && bytes.empty()) break;
  }
  return all;
}

}  // namespace

void unpack(io::ByteView bytes) {
  io::Bytes whole, parts;
  const bool good = accepts([&] { whole = unpacked(bytes, SIZE_MAX); }, bytes.size());
  const bool good_parts = accepts([&] { parts = unpacked(bytes, 5); }, bytes.size());
  if (whole.size() >= kGenerous || parts.size() >= kGenerous) return;  // stopped at places of their own
  require(good == good_parts && whole == parts, "the same however the bytes come");
}

}  // namespace efla::fuzz
