#include "efla/ops/context.h"

#include <pthread.h>

#include <mutex>
#include <string>
#include <system_error>

#include "efla/base/error.h"

namespace efla {
namespace {

struct ProcessPool {
  ThreadPool pool;
  ProcessPool* inherited;  // the parent process's pool, which only has to remain reachable for leak checkers
};

// The pool lives until the process ends. Destroying it at exit would join its threads, which a forked child does not
// have, and objects that are destroyed later might still compute. None of these variables has a destructor.
std::mutex pool_mutex;
int pool_threads = 0;  // 0: one per processor
ProcessPool* process_pool = nullptr;
ProcessPool* inherited_pool = nullptr;

// Leaves the parent's pool alone in a forked child, because its threads do not exist there and its mutexes may stay
// locked for ever.
void start_anew_in_child() {
  if (process_pool != nullptr) inherited_pool = process_pool;
  process_pool = nullptr;
  pool_mutex.unlock();
}

// Returns a new pool of `threads` threads.
ProcessPool* make_pool(int threads) {
  static const int error = pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); }, start_anew_in_child);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  return new ProcessPool{ThreadPool(threads), inherited_pool};
}

}  // namespace

ThreadPool& ExecutionContext::threads() const { return pool != nullptr ? *pool : default_pool(); }

ThreadPool& default_pool() {
  const std::lock_guard lock(pool_mutex);
  if (process_pool == nullptr) process_pool = make_pool(pool_threads > 0 ? pool_threads : available_processors());
  return process_pool->pool;
}

void set_threads(int threads) {
  if (threads < 1 || threads > 1024) throw Error("set_threads", "threads", std::to_string(threads), "1 to 1024");
  const std::lock_guard lock(pool_mutex);
  ProcessPool* const before = process_pool;
  process_pool = make_pool(threads);
  pool_threads = threads;
  delete before;
}

}  // namespace efla
