#include "efla/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace efla {
namespace {

// Whether this thread is running a task.
thread_local bool inside = false;

// An idle thread yields its processor for this long before it sleeps, because waking a sleeping thread may take longer
// than the work between two runs.
constexpr std::chrono::microseconds kPatience(50);

using Clock = std::chrono::steady_clock;

// Waits until the condition is true, at most for kPatience. Returns whether the condition became true.
template <class Condition>
bool met_soon(Condition met) {
  const auto end = Clock::now() + kPatience;
  while (!met()) {
    if (Clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

// On destruction, at the end of a run, sets the time until which the threads stay awake for the next run.
struct Patience {
  std::atomic<Clock::rep>& end;
  explicit Patience(std::atomic<Clock::rep>& end) : end(end) {}
  ~Patience() { end = (Clock::now() + kPatience).time_since_epoch().count(); }
};

struct InsideTask {
  bool before = inside;
  InsideTask() { inside = true; }
  ~InsideTask() { inside = before; }
};

}  // namespace

struct ThreadPool::Impl {
  // The tasks [next, end) that one thread runs first. Threads without tasks of their own take tasks from this range.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };

  explicit Impl(int threads) : shares(static_cast<std::size_t>(threads)) {}
  // Ends the threads that were started. If the system refused a thread, these are fewer than `threads`.
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      ++generation;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::vector<std::thread> workers;
  std::mutex run_mutex;  // one run at a time
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<std::uint64_t> generation{0};  // number of runs, plus one when the pool ends; changed under the mutex
  int sleeping = 0;                          // threads that must be woken
  bool stopping = false;
  bool open = false;                         // the run may still be joined
  std::atomic<Clock::rep> patient_until{0};  // time at which the threads go to sleep after the last run
  std::atomic<int> active{0};                // threads that have joined the run, without the caller

  const std::function<void(std::int64_t, int)>* task = nullptr;
  std::vector<Share> shares;  // one per thread
  std::exception_ptr error;

  // Runs the thread's own range first. The range is the same in every run, so its data may still be in the cache.
  void work(int worker) {
    const InsideTask guard;
    const std::size_t first = static_cast<std::size_t>(worker);
    for (std::size_t i = 0; i < shares.size(); ++i) {
      Share& share = shares[(first + i) % shares.size()];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const std::int64_t number = share.next.fetch_add(1, std::memory_order_relaxed);
        if (number < share.end) run_task(number, worker);
      }
    }
  }

  void run_task(std::int64_t number, int worker) {
    try {
      (*task)(number, worker);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      for (Share& share : shares) share.next.store(share.end, std::memory_order_relaxed);
    }
  }

  void loop(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      if (generation == seen) {
        lock.unlock();
        met_soon([&] { return generation != seen; });
        lock.lock();
      }
      ++sleeping;
      wake.wait(lock, [&] { return stopping || generation != seen; });
      --sleeping;
      if (stopping) return;
      seen = generation;
      if (!open) continue;
      ++active;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--active == 0) done.notify_one();
    }
  }
};

std::thread start_thread(std::function<void()> run, int threads) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    throw std::runtime_error("cannot start " + std::to_string(threads) + (threads == 1 ? " thread: " : " threads: ") +
                             error.code().message());
  }
}

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>(std::max(threads, 1))) {
  for (int worker = 1; worker < std::max(threads, 1); ++worker) {
    impl_->workers.push_back(start_thread([impl = impl_.get(), worker] { impl->loop(worker); }, threads));
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

bool ThreadPool::in_use() const { return Clock::now().time_since_epoch().count() < impl_->patient_until; }

void ThreadPool::run(std::int64_t count, const std::function<void(std::int64_t, int)>& task) {
  if (count <= 0) return;
  if (inside || threads() == 1) {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  const Patience at_the_end(impl_->patient_until);
  if (count == 1) return task(0, 0);
  const std::lock_guard run_lock(impl_->run_mutex);
  bool wake = false;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->task = &task;
    for (std::int64_t i = 0; i < threads(); ++i) {
      auto& share = impl_->shares[static_cast<std::size_t>(i)];
      share.next.store(count * i / threads(), std::memory_order_relaxed);
      share.end = count * (i + 1) / threads();
    }
    impl_->error = nullptr;
    impl_->open = true;
    ++impl_->generation;
    wake = impl_->sleeping > 0;
  }
  if (wake) impl_->wake.notify_all();
  impl_->work(0);
  {
    // A thread that wakes after this point finds no tasks. The caller does not wait for it, because waking a thread may
    // take longer than the tasks.
    const std::lock_guard lock(impl_->mutex);
    impl_->open = false;
  }
  met_soon([&] { return impl_->active == 0; });
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->active == 0; });
  if (impl_->error) std::rethrow_exception(impl_->error);
}

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

}  // namespace efla
