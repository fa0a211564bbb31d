// Work in a process that is killed in the middle of it.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <thread>

namespace efla::test {

// Runs work(confirm) in a process of its own. The work calls confirm() after each piece that must survive, and returns
// only if it fails. Kills the process some time after the first piece. Returns the number of confirmed pieces.
inline std::int64_t confirmed_until_killed(std::chrono::milliseconds time,
                                           const std::function<void(const std::function<void()>& confirm)>& work) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  EXPECT_GE(child, 0);
  if (child == 0) {
    close(ends[0]);
    work([&] {
      if (write(ends[1], "+", 1) != 1) _exit(1);
    });
    _exit(1);
  }
  close(ends[1]);
  char one = 0;
  EXPECT_EQ(read(ends[0], &one, 1), 1) << "the work failed before its first piece";
  std::int64_t confirmed = 1;
  std::this_thread::sleep_for(time);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  while (read(ends[0], &one, 1) == 1) ++confirmed;
  close(ends[0]);
  return confirmed;
}

}  // namespace efla::test
