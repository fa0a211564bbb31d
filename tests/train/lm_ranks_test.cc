// Training of language models by several processes.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cli/support/program.h"
#include "efla/train/distributed/process_group.h"
#include "efla/train/distributed/watched_store.h"
#include "tests/support/expect_error.h"
#include "tests/train/lm_training.h"

namespace efla::train {
namespace {

using test::expect_error;

// Ranks as threads of this process, which is all the same to them.
class SeveralRanks : public LmTraining {
 protected:
#if !__has_include(<gloo/algorithm.h>)
  void SetUp() override { GTEST_SKIP() << "this build has no Gloo"; }
#endif

  // Calls work(group) as every rank of `size`; the first exception of each.
  std::vector<std::string> as_ranks(int size, const std::function<void(ProcessGroup&)>& work) {
    RankEnvironment environment;
    environment.size = size;
    environment.port = free_port();
    std::vector<std::string> errors(size);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        RankEnvironment mine = environment;
        mine.rank = r;
        const auto group = ProcessGroup::join(mine, torch::kCPU);
        try {
          work(*group);
          group->shutdown();
        } catch (const std::exception& error) {
          group->shutdown(error.what());
          errors[r] = error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return errors;
  }

  // A port that nobody listens at.
  static int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                       ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    ::close(socket);
    if (!bound) throw std::runtime_error("no free port");
    return ntohs(address.sin_port);
  }
};

// A launcher's store that speaks another protocol must not keep the ranks waiting.
TEST_F(SeveralRanks, AStoreThatDoesNotAnswerIsNamed) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(socket, 8), 0);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  RankEnvironment environment;
  environment.size = 2;
  environment.port = ntohs(address.sin_port);
  environment.launcher_has_store = true;
  std::string error;
  try {
    ProcessGroup::join(environment, torch::kCPU);
  } catch (const std::runtime_error& thrown) {
    error = thrown.what();
  }
  // The socket stays open, because the thread that waits for an answer stays too.
  EXPECT_NE(error.find("does not answer; torchrun must belong to the PyTorch"), std::string::npos) << error;
}

TEST_F(SeveralRanks, TrainAsOneDoes) {
  const auto one = train(1, 6, *alone_);
  for (const int size : {2, 4}) {
    std::vector<Course> courses(size);
    const auto errors = as_ranks(size, [&](ProcessGroup& group) { courses[group.rank()] = train(1, 6, group); });
    EXPECT_EQ(errors, std::vector<std::string>(size));
    for (const auto& course : courses) {
      EXPECT_EQ(course.losses, courses[0].losses);
      EXPECT_EQ(course.parameters, courses[0].parameters);
    }
    for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(courses[0].losses[i], one.losses[i], 1e-5) << i;
    for (std::size_t i = 0; i < one.parameters.size(); ++i) {
      ASSERT_NEAR(courses[0].parameters[i], one.parameters[i], 1e-4) << i;
    }
  }
}

TEST_F(SeveralRanks, WriteOneRunThatAnyNumberOfRanksGoesOnWith) {
  auto options = small_options();
  options.evaluate_every = 4;
  options.checkpoint_every = 4;
  ASSERT_EQ(run(folder_ / "one", options), RunEnd::finished);
  std::filesystem::create_directory(folder_ / "several");
  std::int64_t seen = 0;
  const auto run_as = [&](int size, std::int64_t stop_after) {
    seen = 0;
    return as_ranks(size, [&](ProcessGroup& group) {
      RunEvents events;
      if (group.rank() == 1) events.stop = [&] { return ++seen > stop_after; };
      run_in(group, folder_ / "several", options, 1, events);
    });
  };
  EXPECT_EQ(run_as(2, 5), std::vector<std::string>(2)) << "rank 1 alone was asked to stop";
  const auto stopped_at = io::CheckpointFolder(folder_ / "several").latest()->step;
  EXPECT_GT(stopped_at, 2);
  EXPECT_LT(stopped_at, 12);
  EXPECT_EQ(run_as(4, 1000), std::vector<std::string>(4));
  const auto one = timeless_metrics(folder_ / "one"), several = timeless_metrics(folder_ / "several");
  ASSERT_EQ(one.size(), several.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].at("event"), several[i].at("event"));
    EXPECT_EQ(one[i].at("tokens"), several[i].at("tokens"));
    EXPECT_NEAR(one[i].at("loss").get<double>(), several[i].at("loss").get<double>(), 1e-4);
  }
}

TEST_F(SeveralRanks, ARankThatStopsEndsTheOthersWithItsReason) {
  const auto errors = as_ranks(2, [&](ProcessGroup& group) {
    group.gather({1.0});
    if (group.rank() == 1) throw std::runtime_error("the disk is full");
    group.gather({2.0});
  });
  EXPECT_EQ(errors[1], "the disk is full");
  EXPECT_EQ(errors[0], "rank 1 of 2 stopped: the disk is full");
}

// Gloo throws on a thread of its own where a message is longer than the one expected.
TEST_F(SeveralRanks, AnExceptionOnAnotherThreadIsAMessageAndExitCode1) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        cli::report_uncaught_exceptions();
        as_ranks(2, [](ProcessGroup& group) { group.gather(std::vector<double>(group.rank() == 0 ? 1 : 100000)); });
        std::exit(0);
      },
      testing::ExitedWithCode(cli::kFailure), "efla: .*gloo");
}

#if __has_include(<gloo/algorithm.h>)
// A store whose host stands still from the second call on.
class StillStore : public c10d::HashStore {
 public:
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (calls_++ > 0) release_.get_future().wait();
    return c10d::HashStore::add(key, value);
  }
  void go_on() { release_.set_value(); }

 private:
  int calls_ = 0;
  std::promise<void> release_;
};

TEST(WatchedStore, DoesNotWaitForAHostThatStandsStill) {
  const auto host = c10::make_intrusive<StillStore>();
  {
    WatchedStore store(host, std::chrono::milliseconds(100));
    EXPECT_FALSE(store.has("a"));
    store.set("a", "text");
    EXPECT_TRUE(store.has("a"));
    EXPECT_EQ(store.get("a"), "text");
    EXPECT_EQ(store.add("n", 2), 2);
    EXPECT_THROW(store.add("n", 1), std::runtime_error);
    EXPECT_THROW(store.has("a"), std::runtime_error);
  }
  host->go_on();
}
#endif

TEST(RankEnvironment, IsWhatLaunchersSay) {
  const std::vector<const char*> names{"RANK",
                                       "WORLD_SIZE",
                                       "LOCAL_RANK",
                                       "MASTER_ADDR",
                                       "MASTER_PORT",
                                       "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK",
                                       "OMPI_COMM_WORLD_LOCAL_SIZE"};
  for (const char* name : names) ::unsetenv(name);
  EXPECT_EQ(RankEnvironment::read().size, 1);
  ::setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1);
  EXPECT_EQ(RankEnvironment::read().rank, 1);
  EXPECT_EQ(RankEnvironment::read().address, "127.0.0.1");
  ::setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  expect_error([] { RankEnvironment::read(); }, "MASTER_ADDR", "got nothing");
  ::setenv("WORLD_SIZE", "2", 1);
  expect_error([] { RankEnvironment::read(); }, "RANK", "got nothing");
  ::setenv("RANK", "2", 1);
  expect_error([] { RankEnvironment::read(); }, "RANK", "got '2', expected 0 to 1");
  ::setenv("RANK", "1", 1);
  ::setenv("MASTER_ADDR", "host", 1);
  ::setenv("MASTER_PORT", "123", 1);
  EXPECT_EQ(RankEnvironment::read().address, "host");
  EXPECT_EQ(RankEnvironment::read().port, 123);
  for (const char* name : names) ::unsetenv(name);
}

}  // namespace
}  // namespace efla::train
