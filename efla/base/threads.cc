#include "efla/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace efla {
namespace {

thread_local bool inside = false;

// So often run looks for the end of the last task before it sleeps: sleeping and waking would take longer.
constexpr int kYields = 50;

struct InsideTask {
  bool before = inside;
  InsideTask() { inside = true; }
  ~InsideTask() { inside = before; }
};

}  // namespace

struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  std::mutex run_mutex;  // one run at a time
  std::mutex mutex;
  std::condition_variable wake, done;
  std::uint64_t generation = 0;
  bool stopping = false;
  bool open = false;           // the run may still be joined
  std::atomic<int> active{0};  // threads that have joined it, without the caller

  const std::function<void(std::int64_t, int)>* task = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;

  void work(int worker) {
    const InsideTask guard;
    for (;;) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      try {
        (*task)(i, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  }

  void loop(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || generation != seen; });
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

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  for (int worker = 1; worker < std::max(threads, 1); ++worker) {
    impl_->workers.emplace_back([impl = impl_.get(), worker] { impl->loop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  for (auto& worker : impl_->workers) worker.join();
}

int ThreadPool::threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::run(std::int64_t count, const std::function<void(std::int64_t, int)>& task) {
  if (count <= 0) return;
  if (inside || threads() == 1 || count == 1) {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  const std::lock_guard run_lock(impl_->run_mutex);
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->task = &task;
    impl_->count = count;
    impl_->next.store(0, std::memory_order_relaxed);
    impl_->error = nullptr;
    impl_->open = true;
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->work(0);
  {
    // A thread that wakes only now finds nothing to do, and nobody waits for it: waking may take longer than the tasks.
    const std::lock_guard lock(impl_->mutex);
    impl_->open = false;
  }
  for (int i = 0; i < kYields && impl_->active != 0; ++i) std::this_thread::yield();
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
