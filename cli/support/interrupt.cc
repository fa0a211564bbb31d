#include "cli/support/interrupt.h"

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>

#include "cli/support/print.h"

namespace efla::cli {
namespace {

std::atomic<bool> asked_to_stop = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler may set it

void on_signal(int) { asked_to_stop = true; }

}  // namespace

void watch_for_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return asked_to_stop; }

void watch_for_ctrl_c() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

void forget_interrupt() { asked_to_stop = false; }

void end_interrupted(const std::string& how_to_continue) {
  print_or_drop(stderr, how_to_continue + "\n");
  throw CLI::RuntimeError(kInterruptedExitCode);
}

}  // namespace efla::cli
