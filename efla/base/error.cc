#include "efla/base/error.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "efla/base/printable.h"

namespace efla {
namespace {

std::string io_message(const std::string& path, std::int64_t offset, const std::string& what) {
  if (offset < 0) return path + ": " + what;
  return path + ": at byte " + std::to_string(offset) + ": " + what;
}

}  // namespace

Error::Error(std::string operation, std::string argument, std::string got, std::string expected)
    : std::runtime_error(printable(operation + ": " + argument + ": got " + got + ", expected " + expected)),
      operation_(std::move(operation)),
      argument_(std::move(argument)),
      got_(std::move(got)),
      expected_(std::move(expected)) {}

IoError::IoError(Kind kind, std::string path, std::int64_t offset, std::string what)
    : std::runtime_error(printable(io_message(path, offset, what))),
      kind_(kind),
      path_(std::move(path)),
      offset_(offset) {}

bool says_no_gpu_memory(std::string_view message) {
  constexpr std::string_view kParts[] = {"CUDA out of memory", "CUDA error: out of memory", "cudaErrorMemoryAllocation",
                                         "CUBLAS_STATUS_ALLOC_FAILED"};
  return std::any_of(std::begin(kParts), std::end(kParts),
                     [&](std::string_view part) { return message.find(part) != message.npos; });
}

}  // namespace efla
