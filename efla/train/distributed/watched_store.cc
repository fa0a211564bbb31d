#include "efla/train/distributed/watched_store.h"

#include <condition_variable>
#include <future>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "efla/base/threads.h"

namespace efla::train {

// What the caller and the thread share.
struct WatchedStore::Calls {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> next;
  bool ended = false;

  void post(std::function<void()> call) {
    const std::lock_guard lock(mutex);
    next = std::move(call);
    changed.notify_one();
  }

  void end() {
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_one();
  }

  void run() {
    for (std::unique_lock lock(mutex);;) {
      changed.wait(lock, [this] { return next || ended; });
      if (ended) return;
      const auto call = std::exchange(next, nullptr);
      lock.unlock();
      call();
      lock.lock();
    }
  }
};

WatchedStore::WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit)
    : store_(std::move(store)),
      limit_(limit),
      calls_(std::make_shared<Calls>()),
      thread_(start_thread([calls = calls_] { calls->run(); })) {}

WatchedStore::~WatchedStore() {
  calls_->end();
  if (silent_) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

template <class Call>
auto WatchedStore::ask(Call call) {
  if (silent_) throw std::runtime_error("the store has not answered");
  using Answer = decltype(call(*store_));
  const auto task =
      std::make_shared<std::packaged_task<Answer()>>([store = store_, call = std::move(call)] { return call(*store); });
  auto answer = task->get_future();
  calls_->post([task] { (*task)(); });
  if (answer.wait_for(limit_) != std::future_status::ready) {
    silent_ = true;
    throw std::runtime_error("the store does not answer");
  }
  return answer.get();
}

std::int64_t WatchedStore::add(const std::string& key, std::int64_t value) {
  return ask([=](c10d::Store& store) { return store.add(key, value); });
}

bool WatchedStore::has(const std::string& key) {
  return ask([=](c10d::Store& store) { return store.check({key}); });
}

std::string WatchedStore::get(const std::string& key) {
  const auto bytes = ask([=](c10d::Store& store) { return store.get(key); });
  return {bytes.begin(), bytes.end()};
}

void WatchedStore::set(const std::string& key, const std::string& text) {
  ask([=](c10d::Store& store) { store.set(key, std::vector<std::uint8_t>(text.begin(), text.end())); });
}

}  // namespace efla::train
