// Builds the bytes of an IDX file, valid or not.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace efla::test {

inline std::string idx_bytes(std::uint32_t magic, std::initializer_list<std::uint32_t> extents, std::string_view data) {
  std::string bytes;
  const auto put = [&](std::uint32_t x) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(x >> shift));
  };
  put(magic);
  for (const auto extent : extents) put(extent);
  return bytes.append(data);
}

}  // namespace efla::test
