// What the figures of a study say, in words.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "efla/report/smnist_study.h"

namespace efla::report {

// One test of robustness, a against b: at the strongest level that both were measured at, and in the mean over all
// levels that both were measured at.
struct Comparison {
  // chance: both guess (below 15 %, of ten classes). even: the difference is within the sum of the two standard
  // deviations. With one seed on either side there is no spread to go by, and every difference counts.
  enum class Verdict { ahead, behind, even, chance };
  struct Sides {
    Spread a, b;
    Verdict verdict() const;
  };

  std::size_t perturbation;  // in kPerturbations
  double strongest_level;
  int levels;
  Sides strongest;
  // The mean of each run over the levels, then over the runs. Where the runs are not known, the deviation is the mean
  // of those of the levels, which is no less.
  Sides mean;
};

// Nothing where no common level but the clean one was measured.
std::optional<Comparison> compare(const Group& a, const Group& b, std::size_t perturbation);

// Two configurations to set side by side: efla and deltanet, at their headline first, then with each other number of
// layers at the same learning rate.
struct Pair {
  Group a, b;
};
std::vector<Pair> efla_against_deltanet(const Study& study);

std::string in_percent(const Spread& spread);                  // "96.5 ± 0.2"
std::string percent(const Spread& spread);                     // "96.5 ± 0.2 %"
std::string points(double difference);                         // a difference of two shares: "+8.2", in points
std::string setting(const Group& group);                       // "one layer, learning rate 0.003, 3 seeds"
std::string headline_setting(const Study& study);              // that of all mixers, or of each where they differ
std::string at_level(std::size_t perturbation, double level);  // "an intensity factor of 16"

// The paragraph under the title: whether the paper's figure 1 is borne out, who is ahead in each test and by how much,
// with more layers too, and the accuracy on clean images. A claim is borne out where both the strongest level and the
// mean over the levels are ahead.
std::string summary(const Study& study);

}  // namespace efla::report
