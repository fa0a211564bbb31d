#include "efla/ops/context.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#include "efla/base/error.h"

namespace efla {
namespace {

constexpr int kMostThreads = 1024;

struct ProcessPools {
  std::map<int, ThreadPool> by_threads;
  ProcessPools* inherited;  // the parent process's pools, which only have to remain reachable for leak checkers
};

// The pools live until the process ends. Destroying them at exit would join their threads, which a forked child does
// not have, and objects that are destroyed later might still compute. None of these variables has a destructor.
std::mutex pools_mutex;
int chosen_threads = 0;  // by set_threads; 0: not called yet
ProcessPools* pools = nullptr;
ProcessPools* inherited_pools = nullptr;

// Leaves the parent's pools alone in a forked child, because their threads do not exist there and their mutexes may
// stay locked for ever.
void start_anew_in_child() {
  if (pools != nullptr) inherited_pools = pools;
  pools = nullptr;
  pools_mutex.unlock();
}

// Returns the process's pool of `threads` threads. The caller holds pools_mutex.
ThreadPool& pool_of(int threads) {
  static const int error =
      pthread_atfork([] { pools_mutex.lock(); }, [] { pools_mutex.unlock(); }, start_anew_in_child);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  if (pools == nullptr) pools = new ProcessPools{{}, inherited_pools};
  return pools->by_threads.try_emplace(threads, threads).first->second;
}

}  // namespace

ThreadPool& ExecutionContext::threads() const { return pool != nullptr ? *pool : default_pool(); }

ThreadPool& default_pool(int threads) {
  const std::lock_guard lock(pools_mutex);
  if (chosen_threads > 0) return pool_of(chosen_threads);
  return pool_of(threads > 0 ? std::min(threads, kMostThreads) : available_processors());
}

void set_threads(int threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw Error("set_threads", "threads", std::to_string(threads), "1 to " + std::to_string(kMostThreads));
  }
  const std::lock_guard lock(pools_mutex);
  pool_of(threads);
  chosen_threads = threads;
}

}  // namespace efla
