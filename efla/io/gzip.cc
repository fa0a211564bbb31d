#include "efla/io/gzip.h"

#include <algorithm>
#include <span>

#include "efla/io/content_error.h"
#include "efla/io/unpack.h"

namespace efla::io {

Bytes gunzip(ByteView packed, const std::string& path, std::size_t max_bytes) {
  constexpr std::size_t kFirstOutput = std::size_t{1} << 16;
  max_bytes = std::min(max_bytes, SIZE_MAX - 1);
  const auto unpacker = make_unpacker(Packing::gzip, path);
  ByteView rest = packed;
  Bytes out;
  for (;;) {
    const auto before = out.size();
    // One byte past the bound shows that there is more than the bound allows.
    out.resize(std::min(std::max(2 * before, kFirstOutput), max_bytes + 1));
    const auto count = unpacker->unpack(rest, true, std::span(out).subspan(before));
    out.resize(before + count);
    if (out.size() > max_bytes) {
      fail_at(path, packed.size() - rest.size(),
              "gzip stream unpacks to more than " + std::to_string(max_bytes) + " bytes");
    }
    if (count == 0 && rest.empty()) return out;
  }
}

MaybeGzip read_maybe_gzip(const std::filesystem::path& path, std::size_t max_bytes) {
  auto bytes = read_file(path, max_bytes);
  if (packing_of(bytes) != Packing::gzip) return {std::move(bytes), false};
  return {gunzip(bytes, path.string(), max_bytes), true};
}

}  // namespace efla::io
