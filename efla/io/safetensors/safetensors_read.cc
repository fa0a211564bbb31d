#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/content_error.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/safetensors/safetensors_checksum.h"
#include "efla/io/safetensors/safetensors_header.h"

namespace efla::io {
namespace {

constexpr std::size_t kSizeField = 8;
// The limit of the reference implementation.
constexpr std::uint64_t kMaxHeader = 100'000'000;

std::size_t header_size(ByteView bytes, const std::string& path) {
  if (bytes.size() < kSizeField) fail_at(path, bytes.size(), "the size of the safetensors header is cut short");
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < kSizeField; ++i) size |= std::uint64_t{bytes[i]} << (8 * i);
  if (size > kMaxHeader) {
    fail_at(path, 0,
            fmt::format("a header of {} bytes, expected at most {} (not a safetensors file?)", size, kMaxHeader));
  }
  if (size > bytes.size() - kSizeField) {
    fail_at(path, bytes.size(),
            fmt::format("the header is cut short: {} bytes of {}", bytes.size() - kSizeField, size));
  }
  // The format requires the brace. The check also tells foreign files from truncated ones.
  if (size == 0 || bytes[kSizeField] != '{') fail_at(path, kSizeField, "the header does not begin with {");
  return static_cast<std::size_t>(size);
}

// Returns the number of bytes that a tensor's shape needs.
std::uint64_t shape_bytes(const HeaderEntry& entry, const std::string& path) {
  std::uint64_t size = type_bytes(entry.type);
  for (const auto extent : entry.shape) {
    if (__builtin_mul_overflow(size, static_cast<std::uint64_t>(extent), &size)) {
      fail_at(path, entry.offset, fmt::format("tensor \"{}\": its size overflows 64 bits", printable(entry.name)));
    }
  }
  return size;
}

void check_data(const HeaderEntry& entry, std::uint64_t expected_begin, std::size_t data_size,
                const std::string& path) {
  const auto [begin, end] = entry.data;
  const auto where = fmt::format("tensor \"{}\": data_offsets [{}, {}]", printable(entry.name), begin, end);
  if (begin > end) fail_at(path, entry.offset, where + " run backwards");
  if (end > data_size) {
    fail_at(path, entry.offset, fmt::format("{} end beyond the {} bytes of data in the file", where, data_size));
  }
  if (const auto size = shape_bytes(entry, path); end - begin != size) {
    fail_at(path, entry.offset, fmt::format("{} hold {} bytes, but the shape needs {}", where, end - begin, size));
  }
  if (begin < expected_begin) fail_at(path, entry.offset, where + " overlap those of another tensor");
  if (begin > expected_begin) {
    fail_at(path, entry.offset, fmt::format("{} leave a gap: the data before it ends at {}", where, expected_begin));
  }
}

}  // namespace

SafetensorsContent parse_safetensors(ByteView bytes, const std::string& path) {
  const auto size = header_size(bytes, path);
  auto header = parse_safetensors_header(bytes.subspan(kSizeField, size), kSizeField, path);
  const auto data = bytes.subspan(kSizeField + size);

  auto& entries = header.entries;
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.data < b.data; });
  SafetensorsContent content{{}, std::move(header.metadata)};
  std::uint64_t position = 0;
  for (auto& entry : entries) {
    check_data(entry, position, data.size(), path);
    const auto [begin, end] = entry.data;
    content.tensors.push_back(
        {std::move(entry.name), entry.type, std::move(entry.shape), data.subspan(begin, end - begin)});
    position = end;
  }
  if (position != data.size()) {
    fail_at(path, kSizeField + size + position,
            fmt::format("{} bytes after the end of the last tensor", data.size() - position));
  }
  check_checksums(bytes, content, path);
  return content;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), content_(parse_safetensors(file_.bytes(), file_.path())) {}

const NamedTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::find_if(tensors().begin(), tensors().end(), [&](const auto& t) { return t.name == name; });
  return found == tensors().end() ? nullptr : &*found;
}

}  // namespace efla::io
