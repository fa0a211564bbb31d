#include "efla/eval/perturb.h"

#include "efla/base/random.h"

namespace efla::eval {
namespace {

constexpr std::uint64_t kDropoutStream = std::uint64_t{0xD809} << 48;  // one stream per image and kind
constexpr std::uint64_t kNoiseStream = std::uint64_t{0x6A55} << 48;

}  // namespace

void perturb(const Perturbation& perturbation, std::uint64_t seed, std::uint64_t image, std::span<float> pixels) {
  const double level = perturbation.level;
  switch (perturbation.kind) {
    case Perturbation::Kind::none:
      break;
    case Perturbation::Kind::dropout: {
      Random random(seed, kDropoutStream + image);
      for (float& x : pixels) {
        if (random.uniform() < level) x = 0.0F;
      }
      break;
    }
    case Perturbation::Kind::scale:
      for (float& x : pixels) x *= static_cast<float>(level);
      break;
    case Perturbation::Kind::noise: {
      Random random(seed, kNoiseStream + image);
      for (float& x : pixels) x += static_cast<float>(level * random.normal());
      break;
    }
  }
}

const std::vector<Panel>& robustness_panels() {
  static const std::vector<Panel> panels = {
      {"dropout", "p", Perturbation::Kind::dropout, {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8}},
      {"scale", "factor", Perturbation::Kind::scale, {1.0, 2.0, 4.0, 8.0, 16.0}},
      {"noise", "sigma", Perturbation::Kind::noise, {0.0, 0.05, 0.1, 0.2, 0.4}},
  };
  return panels;
}

}  // namespace efla::eval
