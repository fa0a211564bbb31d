// Scratch memory of a kernel on the CPU for one call, aligned as the kernels need it.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "efla/cpu/common/workspace.h"

namespace efla {

class Scratch {
 public:
  explicit Scratch(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(cpu::kAlignment)))) {}
  cpu::Workspace workspace() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(cpu::kAlignment)); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace efla
