#include "efla/io/idx.h"

#include <array>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/content_error.h"
#include "efla/io/gzip.h"

namespace efla::io {
namespace {

constexpr std::uint32_t kImagesMagic = 0x803;
constexpr std::uint32_t kLabelsMagic = 0x801;
// Far above any data set in this format. Limits the memory that a bad file can allocate.
constexpr std::size_t kMaxBytes = std::size_t{1} << 32;

// The extents and the data of an IDX file of Rank dimensions.
template <int Rank>
struct Idx {
  std::array<std::uint32_t, Rank> extent{};
  ByteView data;
};

template <int Rank>
Idx<Rank> parse(ByteView bytes, const std::string& path, std::uint32_t magic, const char* what) {
  const auto word = [&](std::size_t i) {
    if (bytes.size() < 4 * i + 4) fail_at(path, bytes.size(), "the header of an IDX file is cut short");
    const auto* b = bytes.data() + 4 * i;
    return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | std::uint32_t{b[3]};
  };
  const auto got = word(0);
  if (got != magic) fail_at(path, 0, fmt::format("magic number is {:08x}, expected {:08x} (IDX {})", got, magic, what));
  Idx<Rank> idx;
  constexpr std::size_t kHeader = 4 + 4 * Rank;
  std::uint64_t size = 1;
  for (std::size_t d = 0; d < Rank; ++d) {
    idx.extent[d] = word(1 + d);
    if (d > 0 && idx.extent[d] == 0) fail_at(path, 4 + 4 * d, "an image without pixels");
    if (__builtin_mul_overflow(size, std::uint64_t{idx.extent[d]}, &size)) {
      fail_at(path, 4 + 4 * d, "the product of the extents overflows 64 bits");
    }
  }
  idx.data = bytes.subspan(kHeader);
  if (idx.data.size() < size) {
    fail_at(path, bytes.size(), fmt::format("{} data is cut short: {} bytes of {}", what, idx.data.size(), size));
  }
  if (idx.data.size() > size) {
    fail_at(path, kHeader + size, fmt::format("{} bytes after the end of the {}", idx.data.size() - size, what));
  }
  return idx;
}

// Reads a file and parses it. Errors inside an unpacked file say that their offsets count unpacked bytes.
template <class Parse>
auto read(const std::filesystem::path& path, const Parse& parse) {
  const auto file = read_maybe_gzip(path, kMaxBytes);
  return parse(file.bytes, file.packed ? path.string() + " (unpacked)" : path.string());
}

}  // namespace

IdxImages parse_idx_images(ByteView bytes, const std::string& path) {
  const auto idx = parse<3>(bytes, path, kImagesMagic, "images");
  return {idx.extent[0], idx.extent[1], idx.extent[2], Bytes(idx.data.begin(), idx.data.end())};
}

Bytes parse_idx_labels(ByteView bytes, const std::string& path) {
  const auto idx = parse<1>(bytes, path, kLabelsMagic, "labels");
  return Bytes(idx.data.begin(), idx.data.end());
}

IdxImages read_idx_images(const std::filesystem::path& path) { return read(path, parse_idx_images); }

Bytes read_idx_labels(const std::filesystem::path& path) { return read(path, parse_idx_labels); }

}  // namespace efla::io
