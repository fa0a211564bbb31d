// Runs the program under test as a user would.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temp_folder.h"

namespace efla::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + N if signal N ended the program
  std::string out, err;
};

// Starts a command (its path first) without input, and with its output in the files.
inline pid_t start_command(const std::vector<std::string>& command, const std::string& out, const std::string& err) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&files, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, arguments[0], &files, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (failed != 0) throw std::runtime_error("cannot start " + command[0]);
  return child;
}

// Waits for its end. Returns its exit code, or 128 + N if signal N ended it.
inline int wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) throw std::runtime_error("lost track of a command");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Runs a command and waits for it. If `out` is given, standard output goes to that file and is not returned.
inline ProgramResult run_command(const std::vector<std::string>& command, const std::string& out = "") {
  const TempFolder folder;
  const std::string out_path = out.empty() ? folder.file("out") : out, err_path = folder.file("err");
  ProgramResult result;
  result.exit_code = wait_for(start_command(command, out_path, err_path));
  if (out.empty()) result.out = read_text(out_path);
  result.err = read_text(err_path);
  return result;
}

// Runs a command and kills it with SIGKILL after the time. Returns its exit code like run_command.
inline int run_command_for(const std::vector<std::string>& command, std::chrono::duration<double> time) {
  const auto child = start_command(command, "/dev/null", "/dev/null");
  std::this_thread::sleep_for(time);
  kill(child, SIGKILL);  // has no effect if the command has ended, because nobody has waited for it yet
  return wait_for(child);
}

// Runs efla with these arguments.
inline ProgramResult run_program(std::vector<std::string> arguments, const std::string& out = "") {
  arguments.insert(arguments.begin(), EFLA_PROGRAM);
  return run_command(arguments, out);
}

// Returns the port at which the processes of a test meet. It lies below the ports that Linux gives to connections, of
// which another test may have any.
inline int meeting_port() { return 20000 + ::getpid() % 12000; }

// Passes if the program reported a user's mistake in one line that contains `part`, with exit code 2.
inline ::testing::AssertionResult is_user_mistake(const ProgramResult& result, const std::string& part) {
  if (result.exit_code == 2 && result.out.empty() && result.err.starts_with("efla: ") &&
      result.err.find('\n') == result.err.size() - 1 && result.err.find(part) != std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "expected exit code 2 and one line with \"" << part << "\", got exit code "
                                       << result.exit_code << "\nstdout: " << result.out << "\nstderr: " << result.err;
}

}  // namespace efla::test
