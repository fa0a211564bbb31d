// Processes that fork after they have computed: the child has none of the parent's threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "efla/ops/context.h"

namespace efla {
namespace {

class Fork : public testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_ADDRESS__
    // A child may then wait at its exit for a lock that a starting thread of its parent held at the fork.
    GTEST_SKIP() << "AddressSanitizer (libasan of GCC 12) does not protect the locks of its allocator from a fork";
#endif
  }
};

// Returns the sum of 0 to 99, computed by the process's pool.
std::int64_t sum_of_tasks() {
  std::atomic<std::int64_t> sum = 0;
  default_pool().run(100, [&](std::int64_t i, int) { sum += i; });
  return sum;
}

// Expects that a child that runs `action` exits normally with status 0 if the action returns true. The alarm ends a
// child that hangs.
void expect_child(const std::function<bool()>& action) {
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    std::exit(action() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(Fork, AChildComputesWithThreadsOfItsOwnAndExits) {
  for (const int threads : {1, 2, 4, 3}) {
    set_threads(threads);
    ASSERT_EQ(sum_of_tasks(), 4950);
    expect_child([] { return true; });
    expect_child([&] { return sum_of_tasks() == 4950 && default_pool().threads() == threads; });
    EXPECT_EQ(sum_of_tasks(), 4950) << "in the parent, after the children";
  }
}

TEST_F(Fork, AChildSetsItsThreads) {
  set_threads(3);
  ASSERT_EQ(sum_of_tasks(), 4950);
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect_child([] {
      set_threads(2);
      const bool smaller = default_pool().threads() == 2 && sum_of_tasks() == 4950;
      set_threads(4);
      return smaller && default_pool().threads() == 4 && sum_of_tasks() == 4950;
    });
  }
  EXPECT_EQ(default_pool().threads(), 3);
}

TEST_F(Fork, AChildForks) {
  set_threads(3);
  ASSERT_EQ(sum_of_tasks(), 4950);
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect_child([] {
      const bool before = sum_of_tasks() == 4950;
      expect_child([] { return sum_of_tasks() == 4950 && default_pool().threads() == 3; });
      return before && sum_of_tasks() == 4950 && !testing::Test::HasFailure();
    });
  }
}

}  // namespace
}  // namespace efla
