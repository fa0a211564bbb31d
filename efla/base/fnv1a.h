// The 64-bit FNV-1a hash (Fowler, Noll and Vo), which is equal on every machine. It is no protection against intent.
#pragma once

#include <cstdint>

namespace efla {

inline constexpr std::uint64_t kFnv1aStart = 0xCBF29CE484222325U;  // the hash of no bytes

// Returns the hash of the bytes that gave `hash`, followed by these bytes. Bytes is a container of integers of one
// byte.
template <class Bytes>
std::uint64_t fnv1a(const Bytes& bytes, std::uint64_t hash = kFnv1aStart) {
  for (const auto byte : bytes) hash = (hash ^ static_cast<std::uint8_t>(byte)) * 0x100000001B3U;
  return hash;
}

}  // namespace efla
