// The scratch memory of a kernel, and the arena that allocates its arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace efla::cpu {

inline constexpr std::size_t kAlignment = 64;

struct Workspace {
  std::byte* data = nullptr;  // aligned to kAlignment
  std::size_t bytes = 0;
};

// Allocates consecutive aligned arrays. Without memory an arena only counts bytes, so that one layout function both
// computes the size of a workspace and allocates its arrays.
class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  float* floats(std::int64_t count) {
    float* array = base_ == nullptr ? nullptr : reinterpret_cast<float*>(base_ + bytes_);
    bytes_ += (static_cast<std::size_t>(count) * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

}  // namespace efla::cpu
