// Memory and time a token of generation against the length of the context.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace efla::bench {

// Takes in random tokens with a model of random weights, up to 1024, 4096, … and at last the longest context, and at
// each draws so many from a copy of the state. Prints a line a context and hands over its result as one object
// (bench/README.md). Throws Error for a preset or a mixer that there is not.
void measure_generation(const std::string& preset, const std::string& mixer, std::int64_t longest, std::int64_t draws,
                        const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
