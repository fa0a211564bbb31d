// Lets a caller end long work early.
#pragma once

#include <exception>
#include <functional>

namespace efla {

// Long work throws this after its StopFunction returned true.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};

// Returns whether to stop. Several threads may call it at once. Work with an empty function never stops early.
using StopFunction = std::function<bool()>;

}  // namespace efla
