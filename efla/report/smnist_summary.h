// What the figures of a study say, in words.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "efla/report/smnist_study.h"

namespace efla::report {

// One test of robustness: a against b at the strongest level that both were measured at.
struct Comparison {
  // chance: both guess at that level (below 15 %, of ten classes). even: the difference is within the sum of the two
  // standard deviations. With one seed on either side there is no spread to go by, and every difference counts.
  enum class Verdict { ahead, behind, even, chance };

  std::size_t perturbation;  // in kPerturbations
  double level;
  Spread a, b;
  double mean_difference;  // over all common levels
  Verdict verdict;
};

// Nothing where no common level but the clean one was measured.
std::optional<Comparison> compare(const Group& a, const Group& b, std::size_t perturbation);

// Two configurations to set side by side: efla and deltanet, at their headline first, then with each other number of
// layers at the same learning rate.
struct Pair {
  Group a, b;
};
std::vector<Pair> efla_against_deltanet(const Study& study);

std::string percent(const Spread& spread);                     // "96.5 ± 0.2 %"
std::string points(double difference);                         // a difference of two shares: "+8.2", in points
std::string setting(const Group& group);                       // "one layer, learning rate 0.003, 3 seeds"
std::string at_level(std::size_t perturbation, double level);  // "an intensity factor of 16"

// The paragraph under the title: clean accuracy, who is ahead in each test and by how much, and whether that is what
// the paper's figure 1 shows.
std::string summary(const Study& study);

}  // namespace efla::report
