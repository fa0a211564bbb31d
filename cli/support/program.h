// What the programs efla, efla-torch and efla-bench share: the command line, and what becomes of errors. Nothing else
// prints errors or chooses the exit code: 0, 2 for a user's mistake, 1 for a failure, 130 after Ctrl-C.
#pragma once

#include <CLI/CLI.hpp>
#include <initializer_list>
#include <string_view>

namespace efla::cli {

inline constexpr int kFailure = 1;
inline constexpr int kUserMistake = 2;

// Prints one line on standard error and returns the exit code.
int report(int code, std::string_view message);

// Prints one line on standard error and ends the program with kFailure at once, without waiting for its threads.
[[noreturn]] void end_program(std::string_view message);

// Makes the program report an exception that nobody catches, on any thread, and end with kFailure: some libraries throw
// on threads of their own.
void report_uncaught_exceptions();

using AddCommand = void (*)(CLI::App&);

// Parses the command line of a program with these commands, runs the one that is named, and returns the exit code.
int run_program(const char* name, const char* about, int argc, char** argv, std::initializer_list<AddCommand> commands);
int run_efla(int argc, char** argv, std::initializer_list<AddCommand> commands);

}  // namespace efla::cli
