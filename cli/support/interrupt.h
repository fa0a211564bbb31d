// Ctrl-C: the first one requests a stop at the next safe place, the second one ends the program at once.
#pragma once

#include <string>

namespace efla::cli {

inline constexpr int kInterruptedExitCode = 130;

// Makes the first SIGINT or SIGTERM from now on set interrupted().
void watch_for_interrupts();

bool interrupted();

// Makes every SIGINT from now on set interrupted() and end a read from the terminal, for a dialogue. SIGTERM still ends
// the program.
void watch_for_ctrl_c();
void forget_interrupt();

// Ends the subcommand with exit code 130, after saying on standard error how to continue.
[[noreturn]] void end_interrupted(const std::string& how_to_continue);

}  // namespace efla::cli
