#include "efla/data/digits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/random.h"
#include "efla/data/digit_glyphs.h"

namespace efla::data {
namespace {

constexpr int kSide = 28;
constexpr std::size_t kPixels = kSide * kSide;

// Line segments between two points of a spline.
constexpr int kPieces = 5;
// Nodes per side of the grid of the warp, which covers the glyph's box.
constexpr int kNodes = 4;
// Width in pixels of the ramp between ink and background, about that of MNIST.
constexpr double kEdge = 1.4;

// Median height of a digit in pixels, and how much writers differ: standard deviations or ranges. Lengths are in pixels
// or relative to a glyph's box of height 1, angles in radians; the spreads are of logarithms.
constexpr double kHeight = 18.5;
constexpr double kWarp = 0.062;
constexpr double kPointJitter = 0.012;
constexpr double kRotation = 0.18;
constexpr double kShear = 0.22;
constexpr double kScaleSpread = 0.09;
constexpr double kAspectSpread = 0.13;
constexpr double kShift = 1.2;
constexpr double kThinnest = 1.3, kThickest = 3.4;
// Ink in the middle of a stroke, relative to full ink; values above 1 only make the edges steeper.
constexpr double kFaintest = 0.75, kStrongest = 1.35;

// Deviations are limited to this many standard deviations, so that no digit leaves the image or becomes unreadable.
constexpr double kMaxDeviation = 2.0;

double bounded_normal(Random& random) {
  for (;;) {
    const double x = random.normal();
    if (std::abs(x) <= kMaxDeviation) return x;
  }
}

// Streams of random numbers: one per image, and one for the order of the classes of every ten images.
enum class Use { image, order };
Random stream(Split split, std::uint64_t seed, Use use, std::int64_t index) {
  const std::uint64_t side = split == Split::train ? 0 : 1;
  return Random(seed, side << 63 | std::uint64_t{use == Use::order} << 62 | static_cast<std::uint64_t>(index));
}

// A smooth displacement of the plane: random at the nodes of a grid over the glyph's box, bilinear between them. Points
// that two strokes share stay shared.
class Warp {
 public:
  explicit Warp(Random& random) {
    for (auto& p : node_) p = {kWarp * bounded_normal(random), kWarp * bounded_normal(random)};
  }

  Point operator()(Point p) const {
    const auto [column, u] = locate(p.x);
    const auto [row, v] = locate(p.y);
    const auto at = [&](int r, int c) { return node_[static_cast<std::size_t>(r * kNodes + c)]; };
    const Point a = at(row, column), b = at(row, column + 1), c = at(row + 1, column), d = at(row + 1, column + 1);
    const double wa = (1 - u) * (1 - v), wb = u * (1 - v), wc = (1 - u) * v, wd = u * v;
    return {p.x + wa * a.x + wb * b.x + wc * c.x + wd * d.x, p.y + wa * a.y + wb * b.y + wc * c.y + wd * d.y};
  }

 private:
  struct Cell {
    int index;
    double fraction;
  };
  static Cell locate(double x) {
    const double t = std::clamp((x + 0.5) * (kNodes - 1), 0.0, kNodes - 1.0);
    const int index = std::min(static_cast<int>(t), kNodes - 2);
    return {index, t - index};
  }

  std::array<Point, kNodes * kNodes> node_;
};

struct Segment {
  Point from, to;
};

// Returns the Catmull-Rom spline between p1 and p2 at t in [0, 1].
Point spline(const Point& p0, const Point& p1, const Point& p2, const Point& p3, double t) {
  const auto mix = [t](double a, double b, double c, double d) {
    return b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)));
  };
  return {mix(p0.x, p1.x, p2.x, p3.x), mix(p0.y, p1.y, p2.y, p3.y)};
}

void append_stroke(const std::vector<Point>& points, bool smooth, std::vector<Segment>& segments) {
  const auto last = points.size() - 1;
  for (std::size_t i = 0; i < last; ++i) {
    if (!smooth) {
      segments.push_back({points[i], points[i + 1]});
      continue;
    }
    const auto &p0 = points[i == 0 ? 0 : i - 1], &p3 = points[std::min(i + 2, last)];
    Point from = points[i];
    for (int piece = 1; piece <= kPieces; ++piece) {
      const Point to = spline(p0, points[i], points[i + 1], p3, static_cast<double>(piece) / kPieces);
      segments.push_back({from, to});
      from = to;
    }
  }
}

// Shrinks strokes (in pixels) into MNIST's box of 20 × 20 and moves the centre of their ink to the centre of the image
// plus `shift`, as far as the pen does not reach the border.
void place_strokes(const Point& shift, std::vector<Segment>& segments) {
  constexpr double kBox = 20.0, kMargin = 2.5, kMiddle = (kSide - 1) / 2.0;  // pixel (i, j) has its centre at (j, i)
  Point low{1e9, 1e9}, high{-1e9, -1e9}, sum;
  double ink = 0.0;
  for (const auto& [from, to] : segments) {
    low = {std::min({low.x, from.x, to.x}), std::min({low.y, from.y, to.y})};
    high = {std::max({high.x, from.x, to.x}), std::max({high.y, from.y, to.y})};
    const double length = std::hypot(to.x - from.x, to.y - from.y);
    ink += length;
    sum = {sum.x + length * (from.x + to.x) / 2, sum.y + length * (from.y + to.y) / 2};
  }
  const double scale = std::min(1.0, kBox / std::max(high.x - low.x, high.y - low.y));
  const auto offset = [&](double wanted, double lowest, double highest) {
    return std::clamp(wanted, kMargin - scale * lowest, kSide - 1 - kMargin - scale * highest);
  };
  const double dx = offset(kMiddle + shift.x - scale * sum.x / ink, low.x, high.x);
  const double dy = offset(kMiddle + shift.y - scale * sum.y / ink, low.y, high.y);
  for (auto& [from, to] : segments) {
    from = {scale * from.x + dx, scale * from.y + dy};
    to = {scale * to.x + dx, scale * to.y + dy};
  }
}

// Draws the strokes of one digit as line segments in pixels of the image.
void draw_strokes(int digit, Random& random, std::vector<Segment>& segments) {
  const auto& variants = digit_glyphs(digit);
  const auto& glyph = variants[random.below(static_cast<std::uint32_t>(variants.size()))];
  const Warp warp(random);
  segments.clear();
  std::vector<Point> points;
  for (const auto& stroke : glyph) {
    points.clear();
    for (const auto& p : stroke.points) {
      const Point q = warp(p);
      points.push_back({q.x + kPointJitter * bounded_normal(random), q.y + kPointJitter * bounded_normal(random)});
    }
    append_stroke(points, stroke.smooth, segments);
  }

  const double angle = kRotation * bounded_normal(random), shear = kShear * bounded_normal(random);
  const double height = kHeight * std::exp(kScaleSpread * bounded_normal(random));
  const double width = height * std::exp(kAspectSpread * bounded_normal(random));
  const double cosine = std::cos(angle), sine = std::sin(angle);
  const auto map = [&](Point p) -> Point {
    const double x = width * (p.x - shear * p.y), y = height * p.y;
    return {cosine * x - sine * y, sine * x + cosine * y};
  };
  for (auto& s : segments) s = {map(s.from), map(s.to)};
  const Point shift{kShift * bounded_normal(random), kShift * bounded_normal(random)};
  place_strokes(shift, segments);
}

// Lowers the pixels' squared distances to the strokes where this segment is nearer. Visits the pixels within `reach` of
// the segment.
void measure(const Segment& s, float reach, std::array<float, kPixels>& distance) {
  const auto ax = static_cast<float>(s.from.x), ay = static_cast<float>(s.from.y);
  const auto bx = static_cast<float>(s.to.x) - ax, by = static_cast<float>(s.to.y) - ay;
  const float inverse = 1.0F / std::max(bx * bx + by * by, 1e-12F);
  const auto first = [reach](float low) { return std::max(0, static_cast<int>(std::ceil(low - reach))); };
  const auto last = [reach](float high) { return std::min(kSide - 1, static_cast<int>(std::floor(high + reach))); };
  const int left = first(std::min(ax, ax + bx)), right = last(std::max(ax, ax + bx));
  const int bottom = last(std::max(ay, ay + by));
  for (int i = first(std::min(ay, ay + by)); i <= bottom; ++i) {
    const float py = static_cast<float>(i) - ay;
    for (int j = left; j <= right; ++j) {
      const float px = static_cast<float>(j) - ax;
      const float t = std::clamp((px * bx + py * by) * inverse, 0.0F, 1.0F);
      const float ex = px - t * bx, ey = py - t * by;
      auto& d = distance[static_cast<std::size_t>(i * kSide + j)];
      d = std::min(d, ex * ex + ey * ey);
    }
  }
}

void draw_digit(int digit, Random& random, std::vector<Segment>& segments, std::span<std::uint8_t> pixels) {
  draw_strokes(digit, random, segments);
  const double radius = 0.5 * random.uniform(kThinnest, kThickest);
  const double ink = 255.0 * random.uniform(kFaintest, kStrongest);
  const double reach = radius + kEdge / 2;
  std::array<float, kPixels> distance;
  distance.fill(static_cast<float>(reach * reach));
  for (const auto& s : segments) measure(s, static_cast<float>(reach), distance);
  for (std::size_t i = 0; i < kPixels; ++i) {
    const double coverage = std::clamp((reach - std::sqrt(distance[i])) / kEdge, 0.0, 1.0);
    pixels[i] = static_cast<std::uint8_t>(std::lround(std::min(ink * coverage, 255.0)));
  }
}

}  // namespace

ImageSet builtin_digits(Split split, std::int64_t count, std::uint64_t seed) {
  if (count < 0 || count > kMostDigits) {
    throw Error("builtin_digits", "count", std::to_string(count), "0 to " + std::to_string(kMostDigits));
  }
  const auto n = static_cast<std::size_t>(count);
  ImageSet set{count, kSide, kSide, std::vector<std::uint8_t>(n * kPixels), std::vector<std::uint8_t>(n)};
  std::array<std::uint8_t, kClasses> order{};
  std::vector<Segment> segments;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto place = static_cast<std::size_t>(i % kClasses);
    if (place == 0) {
      std::iota(order.begin(), order.end(), std::uint8_t{0});
      auto random = stream(split, seed, Use::order, i / kClasses);
      for (std::uint32_t k = kClasses; k > 1; --k) std::swap(order[k - 1], order[random.below(k)]);
    }
    set.labels[static_cast<std::size_t>(i)] = order[place];
    auto random = stream(split, seed, Use::image, i);
    draw_digit(order[place], random, segments,
               std::span(set.pixels).subspan(static_cast<std::size_t>(i) * kPixels, kPixels));
  }
  return set;
}

}  // namespace efla::data
