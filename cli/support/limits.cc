#include "cli/support/limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "efla/base/threads.h"

namespace efla::cli {
namespace {

constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;
// A stack that holds training, with room.
constexpr std::uint64_t kStack = kMebibyte / 2;
// What Debian's LibTorch and its libraries take before main() begins, with one thread of OpenBLAS, and some room.
constexpr std::uint64_t kLibTorch = 640 * kMebibyte;
constexpr std::uint64_t kOpenBlasBuffer = 128 * kMebibyte;
constexpr std::uint64_t kUsualStack = 8 * kMebibyte;  // of a thread where the stack has no limit

std::uint64_t limit_on(decltype(RLIMIT_AS) resource) {
  rlimit limit{};
  return ::getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// Returns the number of threads that OpenBLAS starts when it is loaded. Each waits forever for a buffer that it cannot
// allocate.
std::uint64_t openblas_threads() {
  for (const char* name : {"OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    if (const int threads = text == nullptr ? 0 : std::atoi(text); threads > 0) {
      return static_cast<std::uint64_t>(std::min(threads, available_processors()));
    }
  }
  return static_cast<std::uint64_t>(available_processors());
}

std::string too_low(const char* what, const char* option, std::uint64_t got, std::uint64_t expected) {
  constexpr std::uint64_t kUnit = 1024;  // of ulimit
  return std::string(what) + ": got a limit of " + std::to_string(got / kUnit) + " kB (ulimit " + option +
         "), expected at least " + std::to_string(expected / kUnit) + " kB for LibTorch";
}

}  // namespace

std::string lacking_for_libtorch() {
  const auto stack = limit_on(RLIMIT_STACK), space = limit_on(RLIMIT_AS);
  if (stack < kStack) return too_low("stack", "-s", stack, kStack);
  const auto thread_stack = stack == RLIM_INFINITY ? kUsualStack : stack;
  const auto needed = kLibTorch + (openblas_threads() - 1) * (kOpenBlasBuffer + thread_stack);
  return space < needed ? too_low("address space", "-v", space, needed) : "";
}

}  // namespace efla::cli
