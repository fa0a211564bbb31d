#include "efla/cpu/rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace efla::cpu {
namespace {

// The cosines and sines of a token's angles.
struct Angles {
  std::vector<float> cosine, sine;

  void set(const std::vector<double>& frequencies, std::int64_t position) {
    cosine.clear();
    sine.clear();
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      cosine.push_back(static_cast<float>(std::cos(angle)));
      sine.push_back(static_cast<float>(std::sin(angle)));
    }
  }
};

// Rotates one head of K elements.
void rotate(const float* x, std::int64_t x_stride, std::int64_t key_dim, const Angles& angles, float* y,
            std::int64_t y_stride) {
  const auto half = static_cast<std::int64_t>(angles.cosine.size());
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i * x_stride], b = x[(i + half) * x_stride];
    const float cosine = angles.cosine[static_cast<std::size_t>(i)], sine = angles.sine[static_cast<std::size_t>(i)];
    y[i * y_stride] = a * cosine - b * sine;
    y[(i + half) * y_stride] = b * cosine + a * sine;
  }
  if (x == y) return;
  for (std::int64_t i = 2 * half; i < key_dim; ++i) y[i * y_stride] = x[i * x_stride];
}

}  // namespace

void rope(const RopeForward& p, ThreadPool& pool) {
  constexpr std::int64_t kTaskTokens = 16;  // long compared with starting a task
  const std::int64_t tokens = p.x.extent[0], heads = p.x.extent[1], key_dim = p.x.extent[2];
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < p.rotary / 2; ++i) frequencies.push_back(p.frequency(i));
  pool.run((tokens + kTaskTokens - 1) / kTaskTokens, [&](std::int64_t task, int) {
    Angles angles;
    for (std::int64_t n = task * kTaskTokens; n < std::min(tokens, (task + 1) * kTaskTokens); ++n) {
      angles.set(frequencies, p.positions(n));
      for (std::int64_t h = 0; h < heads; ++h) {
        rotate(p.x.at(n, h), p.x.stride[2], key_dim, angles, p.y.at(n, h), p.y.stride[2]);
      }
    }
  });
}

}  // namespace efla::cpu
