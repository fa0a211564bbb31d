// A c10d store whose host may stand still or be cut off: c10d's own calls then never return.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace efla::train {

// Makes every call on a thread of its own, and waits for the answer at most for a limit. For one caller at a time.
class WatchedStore {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit);
  // Does not wait for a call without an answer: its thread stays behind.
  ~WatchedStore();
  WatchedStore(const WatchedStore&) = delete;
  WatchedStore& operator=(const WatchedStore&) = delete;

  // As c10d::Store. Throw what c10d throws, and std::runtime_error where there is no answer within the limit; after
  // that every call throws at once.
  std::int64_t add(const std::string& key, std::int64_t value);
  bool has(const std::string& key);
  std::string get(const std::string& key);
  void set(const std::string& key, const std::string& text);

 private:
  struct Calls;

  template <class Call>
  auto ask(Call call);

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<Calls> calls_;  // the thread has it too
  std::thread thread_;
  bool silent_ = false;
};

}  // namespace efla::train
