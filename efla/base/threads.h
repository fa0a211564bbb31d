// A fixed pool of threads that runs numbered tasks. Which thread runs a task never changes its result: each output
// is written by one task, by the same operations in the same order however the work was cut.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace efla {

class ThreadPool {
 public:
  // threads ≥ 1, counting the caller of run.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Whether the last run ended so shortly ago that threads that took part in it have not gone to sleep. Where runs
  // follow one another like that, small tasks are worth sharing out.
  bool in_use() const;

  // Runs task(i, worker) for every i in [0, count), worker in [0, threads()), and returns when all have ended. A thread
  // begins with the same share of the tasks in every run of as many, then helps others with theirs. The first exception
  // thrown is rethrown. One task alone, or tasks of a run called from inside another run's tasks, are run by the
  // calling thread as worker 0.
  void run(std::int64_t count, const std::function<void(std::int64_t task, int worker)>& task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The processors that this process may use, at least 1.
int available_processors();

}  // namespace efla
