// Checks of arguments.
#pragma once

#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/base/text.h"

namespace efla {

// Throws Error for an argument of one operation whose check fails. `prefix` stands before every argument's name: with
// "training." the argument "lr" is "training.lr".
class Require {
 public:
  constexpr explicit Require(const char* operation, const char* prefix = "") : operation_(operation), prefix_(prefix) {}

  // Throws Error unless `holds`, with the value got and a text of what was expected.
  template <class T>
  void operator()(bool holds, const char* argument, const T& got, const std::string& expected) const {
    if (!holds) throw Error(operation_, std::string(prefix_) + argument, value_text(got), expected);
  }

  // Requires an integer from 1 to `largest`.
  void count(const char* argument, std::int64_t got, std::int64_t largest) const {
    (*this)(got >= 1 && got <= largest, argument, got, "1 to " + std::to_string(largest));
  }

 private:
  const char* operation_;
  const char* prefix_;
};

}  // namespace efla
