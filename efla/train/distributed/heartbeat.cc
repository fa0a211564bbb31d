#include "efla/train/distributed/heartbeat.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "efla/base/threads.h"
#include "efla/train/distributed/process_group.h"

namespace efla::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBeat = std::chrono::milliseconds(250);
// A rank that runs beats every kBeat; a rank that is stopped or cut off counts as lost after this time, and so does the
// host of the store, which holds the beats, if it does not answer.
constexpr auto kSilence = std::chrono::seconds(15);
// After a connection broke: a rank without a heartbeat for this long counts as lost.
constexpr auto kSilenceAfterError = std::chrono::milliseconds(1500);
constexpr auto kJoin = std::chrono::minutes(5);
constexpr auto kLeave = std::chrono::seconds(5);
constexpr const char* kNoAnswer = "does not answer any more";

std::string beats_key(int rank) { return "efla/beats/" + std::to_string(rank); }
std::string left_key(int rank) { return "efla/left/" + std::to_string(rank); }

}  // namespace

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const StopFunction& stop)
    : store_(std::move(store), kSilence), rank_(rank), size_(size), beats_(size), last_seen_(size, Clock::now()) {
  beat();
  meet(stop);
  std::fill(last_seen_.begin(), last_seen_.end(), Clock::now());
  thread_ = start_thread([this] { run(); });
}

void Heartbeat::meet(const StopFunction& stop) {
  const auto start = Clock::now();
  for (std::string absent = missing(); !absent.empty(); absent = missing()) {
    check();
    if (Clock::now() - start > kJoin) {
      throw std::runtime_error("rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                               " waited for five minutes; these ranks have not come: " + absent);
    }
    if (stop && stop()) {
      tell("stopped: it was asked to before all ranks had come");
      throw Stopped();
    }
    std::this_thread::sleep_for(kBeat);
  }
}

std::string Heartbeat::missing() {
  std::string ranks;
  try {
    for (int r = 0; r < size_; ++r) {
      beats_[r] = store_.add(beats_key(r), 0);
      if (beats_[r] == 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
      if (r != rank_) has_left(r);
    }
  } catch (const std::exception&) {
    lost(0, kNoAnswer);  // it holds the store
    check();
  }
  return ranks;
}

Heartbeat::~Heartbeat() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::check() const {
  const std::lock_guard lock(mutex_);
  if (!lost_.empty()) throw RankLost(lost_);
}

void Heartbeat::find_lost(const std::string& why) {
  const auto failed = Clock::now();
  while (Clock::now() < failed + kSilenceAfterError + 2 * kBeat) {
    check();
    std::this_thread::sleep_for(kBeat);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && is_silent(r, kSilenceAfterError)) lost(r, kNoAnswer);
  }
  check();
  throw RankLost("the connection between the ranks broke, though all answer: " + why.substr(0, why.find('\n')));
}

void Heartbeat::leave(const std::string& reason) noexcept {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
  try {
    tell(reason.empty() ? "done" : "stopped: " + reason);
    // The store may end with this process.
    const auto end = Clock::now() + kLeave;
    for (int r = 1; rank_ == 0 && r < size_; ++r) {
      if (is_silent(r, kSilence)) continue;
      while (!store_.has(left_key(r)) && Clock::now() < end) std::this_thread::sleep_for(kBeat / 5);
    }
  } catch (const std::exception&) {
    // Without the store nobody can be told.
  }
}

void Heartbeat::tell(const std::string& text) { store_.set(left_key(rank_), text); }

void Heartbeat::run() {
  while (!stopping_) {
    int asked = rank_;
    try {
      beat();
      for (asked = 0; asked < size_; ++asked) {
        if (asked != rank_) look(asked);
      }
    } catch (const std::exception&) {
      return lost(0, kNoAnswer);  // it holds the store
    }
    std::this_thread::sleep_for(kBeat);
  }
}

void Heartbeat::beat() { store_.add(beats_key(rank_), 1); }

bool Heartbeat::has_left(int rank) {
  if (!store_.has(left_key(rank))) return false;
  const std::string text = store_.get(left_key(rank));
  if (text != "done") lost(rank, text);
  return true;
}

void Heartbeat::look(int rank) {
  if (has_left(rank)) return;
  const std::int64_t beats = store_.add(beats_key(rank), 0);
  {
    const std::lock_guard lock(mutex_);
    if (beats != std::exchange(beats_[rank], beats)) last_seen_[rank] = Clock::now();
  }
  if (is_silent(rank, kSilence)) lost(rank, kNoAnswer);
}

bool Heartbeat::is_silent(int rank, std::chrono::milliseconds time) const {
  const std::lock_guard lock(mutex_);
  return Clock::now() - last_seen_[rank] > time;
}

void Heartbeat::lost(int rank, const std::string& how) {
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) lost_ = "rank " + std::to_string(rank) + " of " + std::to_string(size_) + " " + how;
}

}  // namespace efla::train
