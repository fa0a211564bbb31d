// What commands print: results on standard output, which must not be lost, and progress messages, which may be.
#pragma once

#include <cstdio>
#include <string_view>

namespace efla::cli {

// Writes the text to a standard stream at once, or drops it where it cannot be written: what a command computes is
// worth more than its words. flush_standard_output() still reports what standard output did not take.
void print_or_drop(std::FILE* stream, std::string_view text) noexcept;

// Throws std::system_error where what was printed on standard output cannot be written.
void flush_standard_output();

}  // namespace efla::cli
