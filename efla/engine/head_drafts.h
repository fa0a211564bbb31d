// How many tokens the model's head drafts: as many as promise the most tokens per time, and none where drafts cost more
// than they save.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "efla/nn/inference/text_run.h"

namespace efla::engine {

// What a drafted token costs beside a step without drafts, as far as steps have shown it.
class DraftCost {
 public:
  // Learns the time of a step that only decoded, `texts` texts, after the head had drafted `drafted` tokens.
  void learn(std::int64_t texts, std::int64_t drafted, std::chrono::duration<double> time);
  // Returns the time of drafting and verifying a token, in units of the time of a step that decodes `texts` texts
  // without drafts. Infinity: the next step must have no drafts, because the time of such a step is not known or was
  // measured long ago.
  double per_token(std::int64_t texts) const;

 private:
  struct Times {
    std::chrono::duration<double> step{0}, token{0};  // 0: not known
    int plain = 0, since = 0;                         // steps without drafts, and steps with drafts since the last one
  };

  std::array<Times, nn::kMostDecoded + 1> times_;  // by the number of texts
};

// The lengths of one reply's drafts by the head. The expected length of the accepted part follows from p, the part of
// the reply's last drafted tokens that were right: drafts of n tokens yield 1 + p + … + pⁿ tokens per step.
class HeadDrafts {
 public:
  // Returns the length of the next draft, at most `most`, where a drafted token costs `cost` steps: the n with the most
  // tokens per time, (1 + p + … + pⁿ) / (1 + n cost). If this is none, returns 1 after rising numbers of steps, because
  // p may have changed.
  std::int64_t next(std::int64_t most, double cost);
  // Learns how many of a draft's tokens the reply drew before another one.
  void end(std::size_t right, std::size_t drafted);

 private:
  static constexpr std::int64_t kFirstPause = 32, kLongestPause = 128;

  double right_ = 0.9, tried_ = 1.5;  // recent tokens, as if some had been tried before the first one
  std::int64_t waited_ = 0, pause_ = kFirstPause;
};

}  // namespace efla::engine
