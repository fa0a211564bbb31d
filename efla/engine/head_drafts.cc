#include "efla/engine/head_drafts.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace efla::engine {
namespace {

constexpr double kNew = 0.25;         // of a new time in the mean
constexpr double kUnknownCost = 0.5;  // until the first draft
constexpr int kLeastPlain = 2;        // steps without drafts before the first draft, of which the first may be slow
constexpr int kMostSince = 64;        // steps with drafts from one without drafts to the next
constexpr double kKept = 0.95;        // of the recent tokens, per new one

}  // namespace

// A step without drafts that is slower than others may be one that waited, so that a faster one counts at once.
void DraftCost::learn(std::int64_t texts, std::int64_t drafted, std::chrono::duration<double> time) {
  Times& times = times_[static_cast<std::size_t>(texts)];
  const auto mean = [&](auto& to, auto now) {
    to = to.count() == 0 ? now : kNew * std::min(now, 2 * to) + (1 - kNew) * to;
  };
  if (drafted == 0) {
    time < times.step ? void(times.step = time) : mean(times.step, time);
    times.plain = std::min(times.plain + 1, kLeastPlain);
    times.since = 0;
  } else if (times.step.count() > 0) {
    mean(times.token, std::clamp((time - times.step) / static_cast<double>(drafted), times.step / 100, times.step));
    ++times.since;
  }
}

double DraftCost::per_token(std::int64_t texts) const {
  const Times& times = times_[static_cast<std::size_t>(texts)];
  if (times.plain < kLeastPlain || times.since >= kMostSince) return std::numeric_limits<double>::infinity();
  return times.token.count() == 0 ? kUnknownCost : times.token / times.step;
}

std::int64_t HeadDrafts::next(std::int64_t most, double cost) {
  if (most <= 0 || std::isinf(cost)) return 0;
  const double p = right_ / tried_;
  double best = 1.0, tokens = 1.0, power = 1.0;
  std::int64_t length = 0;
  for (std::int64_t n = 1; n <= most; ++n) {
    tokens += power *= p;
    const double rate = tokens / (1 + static_cast<double>(n) * cost);
    if (rate > best) {
      best = rate;
      length = n;
    }
  }
  if (length > 0) {
    waited_ = 0;
    pause_ = kFirstPause;
  } else if (++waited_ > pause_) {
    waited_ = 0;
    pause_ = std::min(kLongestPause, 2 * pause_);
    length = 1;
  }
  return length;
}

void HeadDrafts::end(std::size_t right, std::size_t drafted) {
  const std::size_t tried = std::min(right + 1, drafted);
  for (std::size_t i = 0; i < tried; ++i) {
    right_ = kKept * right_ + (i < right ? 1.0 : 0.0);
    tried_ = kKept * tried_ + 1.0;
  }
}

}  // namespace efla::engine
