#include "tests/support/no_memory.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace efla::test {
namespace {

constexpr std::int64_t kNever = INT64_MAX / 2;  // more than a program makes

thread_local bool none_here = false, counted_here = true;
std::atomic<std::int64_t> allocations_left = kNever;  // before the one that fails
std::atomic<std::size_t> least_bytes = 0;

// Returns nullptr where the allocation fails.
void* try_to_allocate(std::size_t size) noexcept {
  const bool counts = counted_here && allocations_left < kNever && size >= least_bytes;
  if (none_here || (counts && allocations_left-- == 0)) return nullptr;
  return std::malloc(size > 0 ? size : 1);
}

void* allocate(std::size_t size) {
  if (void* memory = try_to_allocate(size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

NoMemory::NoMemory() { none_here = true; }
NoMemory::~NoMemory() { none_here = false; }

OneFailure::OneFailure(std::int64_t nth, std::size_t bytes) {
  counted_here = false;
  least_bytes = bytes;
  allocations_left = nth;
}
OneFailure::~OneFailure() {
  allocations_left = kNever;
  counted_here = true;
}
bool OneFailure::happened() { return allocations_left < 0; }

}  // namespace efla::test

void* operator new(std::size_t size) { return efla::test::allocate(size); }
void* operator new[](std::size_t size) { return efla::test::allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return efla::test::try_to_allocate(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return efla::test::try_to_allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
