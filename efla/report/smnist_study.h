// The results of `efla reproduce smnist` (results.json), grouped by configuration with statistics over seeds.
#pragma once

#include <array>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace efla::report {

// One figure over several seeds. std is the sample standard deviation (n − 1), NaN for one seed; mean is NaN for none.
struct Spread {
  double mean, std, low, high;
  int count;
};
Spread spread_of(const std::vector<double>& values);

struct Point {
  double x;
  Spread y;
};
using Line = std::vector<Point>;  // ascending x

// The three tests of robustness: the panels of the paper's figure 1.
struct Perturbation {
  const char* key;    // in results.json
  const char* level;  // the name of its level there
  const char* name;
  const char* axis;
  double clean;  // the level that leaves the images as they are
};
inline constexpr std::array<Perturbation, 3> kPerturbations{{
    {"dropout", "p", "Pixel dropout", "share of pixels dropped, p", 0},
    {"scale", "factor", "Intensity scaling", "intensity factor", 1},
    {"noise", "sigma", "Gaussian noise", "standard deviation of the noise, σ", 0},
}};

// The runs that share mixer, layers and learning rate. Accuracies are shares in [0, 1].
struct Group {
  std::string mixer;
  int layers = 0;  // 0: not said
  double lr = 0;   // 0: not said
  std::vector<std::string> seeds;
  Spread clean, images_per_second;
  std::array<Line, kPerturbations.size()> perturbed;  // without the clean level
  // Level → accuracy, one a run; none where only the means over the runs are known.
  std::array<std::vector<std::map<double, double>>, kPerturbations.size()> perturbed_runs;
  Line accuracy_by_epoch, loss_by_step;
};

struct Study {
  std::vector<std::string> mixers;  // efla, deltanet, then the others as they came
  std::vector<Group> groups;        // by mixer in that order, layers, learning rate
  std::vector<Group> headline;      // the configuration chosen for each mixer
};

// What is missing or not a number in results is missing in the study; nothing throws but a lack of memory.
Study read_study(const nlohmann::json& results);

// The line with the clean accuracy as its first point.
Line with_clean(const Group& group, std::size_t perturbation);

}  // namespace efla::report
