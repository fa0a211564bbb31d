// Packs text with xz and zstd for tests of the unpackers; gzip.h has gzip.
#pragma once

#include <lzma.h>
#include <zstd.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace efla::test {

inline std::string xz(std::string_view text) {
  std::string packed(lzma_stream_buffer_bound(text.size()), '\0');
  std::size_t size = 0;
  const auto status =
      lzma_easy_buffer_encode(6, LZMA_CHECK_CRC64, nullptr, reinterpret_cast<const std::uint8_t*>(text.data()),
                              text.size(), reinterpret_cast<std::uint8_t*>(packed.data()), &size, packed.size());
  if (status != LZMA_OK) throw std::runtime_error("lzma_easy_buffer_encode");
  packed.resize(size);
  return packed;
}

inline std::string zstd(std::string_view text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  const auto size = ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3);
  if (ZSTD_isError(size) != 0) throw std::runtime_error("ZSTD_compress");
  packed.resize(size);
  return packed;
}

}  // namespace efla::test
