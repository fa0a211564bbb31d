// Lets allocations fail. Only for programs that link no_memory.cc, which replaces operator new.
#pragma once

#include <cstddef>
#include <cstdint>

namespace efla::test {

// While the object lives, every allocation of this thread fails.
class NoMemory {
 public:
  NoMemory();
  ~NoMemory();
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
};

// While the object lives, one allocation of the other threads fails: number `nth`, counted from 0, of the allocations
// of at least `bytes` bytes.
class OneFailure {
 public:
  explicit OneFailure(std::int64_t nth, std::size_t bytes = 0);
  ~OneFailure();
  OneFailure(const OneFailure&) = delete;
  OneFailure& operator=(const OneFailure&) = delete;

  // Returns whether the allocation has failed.
  static bool happened();
};

}  // namespace efla::test
