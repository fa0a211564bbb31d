#include "efla/engine/prompt_lookup.h"

#include <algorithm>
#include <utility>

#include "efla/nn/inference/inference_model.h"

namespace efla::engine {

std::span<const std::int32_t> PromptLookup::draft(std::span<const std::int32_t> prompt,
                                                  std::span<const std::int32_t> reply, std::int64_t most) {
  constexpr std::size_t kMatched = 3, kSearched = 8192;
  draft_.clear();
  const std::size_t all = prompt.size() + reply.size();
  most = std::min(most, limit_);
  if (most <= 0 || all <= kMatched) return draft_;
  if (pause_ > 0) {
    --pause_;
    return draft_;
  }
  const auto at = [&](std::size_t i) { return i < prompt.size() ? prompt[i] : reply[i - prompt.size()]; };
  const auto matches = [&](std::size_t end) {
    for (std::size_t i = 1; i <= kMatched; ++i) {
      if (at(end - i) != at(all - i)) return false;
    }
    return true;
  };
  const std::size_t least = std::max(kMatched, all - std::min(all, kSearched));
  std::size_t end = all - 1;
  while (end >= least && !matches(end)) --end;
  if (end < least) return draft_;
  for (std::size_t i = end; std::cmp_less(draft_.size(), most); ++i) {
    draft_.push_back(i < all ? at(i) : draft_[i - all]);
  }
  return draft_;
}

void PromptLookup::end(std::size_t right) {
  constexpr std::int64_t kLongestPause = 64;
  if (right == draft_.size()) {
    limit_ = std::min(nn::kMostDecoded - 1, 2 * limit_);
  } else {
    limit_ = static_cast<std::int64_t>(right) + 1;
  }
  if (right == 0) pause_ = next_pause_;
  next_pause_ = right == 0 ? std::min(kLongestPause, 2 * next_pause_) : 1;
}

}  // namespace efla::engine
