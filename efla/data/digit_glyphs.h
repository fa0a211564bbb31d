// The shapes of the ten digits as strokes, before any random change. Used by digits.cc.
#pragma once

#include <vector>

namespace efla::data {

struct Point {
  double x = 0.0, y = 0.0;
};

// A line through the points: smooth (a Catmull-Rom spline) or with corners.
struct Stroke {
  bool smooth = false;
  std::vector<Point> points;
};

using Glyph = std::vector<Stroke>;

// Returns the ways in which a digit is written, in a box of height 1 (y down) with its centre at 0.
const std::vector<Glyph>& digit_glyphs(int digit);

}  // namespace efla::data
