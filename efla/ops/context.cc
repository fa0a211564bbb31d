#include "efla/ops/context.h"

#include <memory>
#include <mutex>
#include <string>

#include "efla/base/error.h"

namespace efla {
namespace {

std::mutex pool_mutex;
std::unique_ptr<ThreadPool> process_pool;

}  // namespace

ThreadPool& ExecutionContext::threads() const { return pool != nullptr ? *pool : default_pool(); }

ThreadPool& default_pool() {
  const std::lock_guard lock(pool_mutex);
  if (!process_pool) process_pool = std::make_unique<ThreadPool>(available_processors());
  return *process_pool;
}

void set_threads(int threads) {
  if (threads < 1 || threads > 1024) throw Error("set_threads", "threads", std::to_string(threads), "1 to 1024");
  const std::lock_guard lock(pool_mutex);
  process_pool = std::make_unique<ThreadPool>(threads);
}

}  // namespace efla
