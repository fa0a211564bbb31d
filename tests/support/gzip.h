// Packs text with gzip for tests of the unpackers.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace efla::test {

// Returns text that packs to about half of its size.
inline std::string sample(std::size_t size) {
  std::string text(size, ' ');
  std::uint32_t x = 1;
  for (auto& c : text) c = static_cast<char>((x = x * 1664525U + 1013904223U) >> 28);
  return text;
}

inline std::string gzip(std::string_view text) {
  z_stream z{};
  if (deflateInit2(&z, 9, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK) throw std::bad_alloc();
  std::string packed(deflateBound(&z, text.size()), '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(packed.data());
  z.avail_out = static_cast<uInt>(packed.size());
  if (deflate(&z, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("deflate");
  packed.resize(z.total_out);
  deflateEnd(&z);
  return packed;
}

}  // namespace efla::test
