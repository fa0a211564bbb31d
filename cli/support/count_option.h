// Options that are counts or seeds.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <limits>
#include <string>

namespace efla::cli {

// Adds an option for a count from `low` to 2^40, which the help shows as `type`.
template <class Count>
CLI::Option* add_count_option(CLI::App& command, const std::string& name, Count& value, const std::string& what,
                              std::int64_t low, const std::string& type = "N") {
  return command.add_option(name, value, what)
      ->check(CLI::Range(low, std::int64_t{1} << 40).description(""))
      ->type_name(type)
      ->capture_default_str();
}

// Accepts seeds up to 2^63 − 1, because TOML, in which configurations are written, has no larger whole numbers.
inline CLI::Range seed_range() {
  return {std::uint64_t{0}, static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())};
}

}  // namespace efla::cli
