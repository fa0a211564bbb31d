// Asking long work to end early.
#pragma once

#include <exception>
#include <functional>

namespace efla::train {

// Thrown by what was asked to stop by its StopFunction.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};
using StopFunction = std::function<bool()>;  // asked from several threads; an empty one never stops

}  // namespace efla::train
