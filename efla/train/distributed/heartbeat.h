// Finds lost ranks: each rank counts up a number of its own in a store that all ranks reach.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "efla/base/stop.h"
#include "efla/train/distributed/watched_store.h"

namespace efla::train {

class Heartbeat {
 public:
  // The store is this object's own connection; the store itself is in rank 0's process or in torchrun's agent. Returns
  // when every rank has beaten once. Throws std::runtime_error naming the ranks that have not come in time, RankLost
  // when another rank stops before all have come, and Stopped when `stop` says so, after telling the other ranks.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const StopFunction& stop);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Throws RankLost when a rank, or the host of the store, has been silent for long, or a rank has said that it stops.
  void check() const;

  // Waits for a few beats after an operation that needs the other ranks has failed, and throws RankLost naming a silent
  // rank. `why` says what failed, for the case that no rank is silent.
  [[noreturn]] void find_lost(const std::string& why);

  // Tells the others that this rank stops, and why ("" for: all is done). Rank 0 then waits up to a few seconds until
  // the other ranks have left too, because its process may hold the store.
  void leave(const std::string& reason) noexcept;

 private:
  // Waits until every rank has beaten once.
  void meet(const StopFunction& stop);
  // Returns the ranks that have not come yet, as "1, 2".
  std::string missing();
  // Tells the others that this rank stops.
  void tell(const std::string& text);
  void run();
  void beat();
  // Returns whether the rank said that it stops; the reason becomes the message of RankLost, unless all is done.
  bool has_left(int rank);
  void look(int rank);
  // Returns whether the rank's number has not risen for this time.
  bool is_silent(int rank, std::chrono::milliseconds time) const;
  void lost(int rank, const std::string& how);

  WatchedStore store_;
  int rank_, size_;
  std::vector<std::int64_t> beats_;                               // of each rank, as last seen
  std::vector<std::chrono::steady_clock::time_point> last_seen_;  // when the number last rose
  mutable std::mutex mutex_;
  std::string lost_;  // the message of RankLost
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace efla::train
