// Errors of libraries about arguments that an option of another name sets.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "efla/base/error.h"

namespace efla::cli {

// The option that sets each argument.
using OptionNames = std::map<std::string, std::string>;

// Returns how messages name a JSON pointer's place: "training.lr" for "/training/lr".
inline std::string argument_at(std::string place) {
  std::replace(place.begin(), place.end(), '/', '.');
  return place.substr(1);
}

// Calls f. Throws Error(command, option, …) in place of f's Error about an argument that an option sets.
template <class F>
decltype(auto) name_options(const std::string& command, const OptionNames& options, const F& f) {
  try {
    return f();
  } catch (const Error& error) {
    const auto found = options.find(error.argument());
    if (found == options.end()) throw;
    throw Error(command, found->second, error.got(), error.expected());
  }
}

template <class F>
decltype(auto) name_option(const std::string& command, const std::string& option, const std::string& argument,
                           const F& f) {
  return name_options(command, {{argument, option}}, f);
}

}  // namespace efla::cli
