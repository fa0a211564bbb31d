// How long work is asked to end early.
#pragma once

#include <exception>
#include <functional>

namespace efla {

// Thrown by work that its StopFunction asked to stop.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};

// Returns whether to stop. Called from several threads; an empty function never stops.
using StopFunction = std::function<bool()>;

}  // namespace efla
