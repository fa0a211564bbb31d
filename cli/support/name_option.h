// Errors of libraries about arguments that an option of another name sets.
#pragma once

#include <string>

#include "efla/base/error.h"

namespace efla::cli {

// Calls f. Throws Error(command, option, …) in place of f's Error about the argument.
template <class F>
decltype(auto) name_option(const std::string& command, const std::string& option, const std::string& argument,
                           const F& f) {
  try {
    return f();
  } catch (const Error& error) {
    if (error.argument() != argument) throw;
    throw Error(command, option, error.got(), error.expected());
  }
}

}  // namespace efla::cli
