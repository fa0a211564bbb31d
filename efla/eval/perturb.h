// The three disturbances of an image's pixels under which section 5.1 of the EFLA paper measures robustness.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace efla::eval {

struct Perturbation {
  enum class Kind {
    none,
    dropout,  // each pixel becomes 0 with probability level; the others are not rescaled
    scale,    // x · level
    noise,    // x + level · N(0, 1), not clipped
  };
  Kind kind = Kind::none;
  double level = 0.0;
};

// Disturbs the pixels of one image in place. The random numbers depend on seed, image (its index in the set) and kind,
// not on the level: a pixel dropped at one probability is dropped at every higher one, and noise grows along one
// direction.
void perturb(const Perturbation& perturbation, std::uint64_t seed, std::uint64_t image, std::span<float> pixels);

// A panel of figure 1: a name, what its level is called, and the levels measured. The first level disturbs nothing.
struct Panel {
  std::string_view name, level_name;
  Perturbation::Kind kind;
  std::vector<double> levels;
};

// Returns the panels dropout p, intensity scale factor and noise sigma.
const std::vector<Panel>& robustness_panels();

}  // namespace efla::eval
