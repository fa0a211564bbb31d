// A fixed pool of threads that runs numbered tasks. The result does not depend on which thread runs which task: each
// output is written by one task, with the same operations in the same order for any number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace efla {

// Starts one thread. `threads` is the number of threads that the caller wants in all. Throws std::runtime_error "cannot
// start N threads: REASON", with N = threads, if the system refuses the thread.
std::thread start_thread(std::function<void()> run, int threads = 1);

class ThreadPool {
 public:
  // threads ≥ 1 includes the thread that calls run.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Returns whether the threads of the last run are still awake. While runs follow one another closely, distributing
  // even small tasks pays off.
  bool in_use() const;

  // Runs task(i, worker) for every i in [0, count), with worker in [0, threads()), and returns when all have ended.
  // Each thread starts with the same range of tasks in every run with the same count, then takes tasks from the other
  // threads' ranges. After an exception no further task starts, and the first exception is rethrown. The calling thread
  // runs all tasks in order, as worker 0, if count is 1, if the pool has one thread, or if run is called from inside a
  // task.
  void run(std::int64_t count, const std::function<void(std::int64_t task, int worker)>& task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the number of processors that this process may use, at least 1.
int available_processors();

}  // namespace efla
