// How much a result may differ from the float64 reference.
//
// The relative RMS error of an output, √(Σ(got − expected)²/Σ expected²), may be `factor` times that of the naive
// implementation in the same dtype (plain_delta.h) or, for bfloat16 and float16 by chunks, of the rounding oracle
// (chunk_oracle.h), plus a floor for outputs of a few elements, for which the naive implementation may be exact by
// luck. Neither it nor the error of a single element may exceed a cap, whatever the naive implementation does.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace efla::test {

struct Tolerance {
  std::string_view kind;  // of results: a dtype, or what loses other digits than its naive implementation
  double floor;           // relative RMS error that is always allowed
  double cap;             // relative RMS error that is never allowed
  double element_cap;     // error of an element, relative to the larger of itself and the output's RMS
  double factor = 2;      // of the naive implementation's error
};

inline const Tolerance& tolerance_of(std::string_view kind) {
  static constexpr Tolerance table[]{
      {"float32", 5e-7, 2e-5, 2e-4},
      {"bfloat16", 1e-5, 3e-3, 1e-2},
      {"float64", 1e-14, 1e-12, 1e-11},
      // Against the rounding oracle (chunk_oracle.h) in the place of the naive implementation.
      {"bfloat16 by chunks", 1e-4, 2e-2, 0.3},
      {"gradients of bfloat16 by chunks", 1e-4, 5e-2, 1.0},
      // float16 has three bits more.
      {"float16", 1e-5 / 8, 3e-3 / 8, 1e-2 / 8},
      {"float16 by chunks", 1e-4 / 8, 2e-2 / 8, 0.3 / 8},
      {"gradients of float16 by chunks", 1e-4 / 8, 5e-2 / 8, 1.0 / 8},
      {"bfloat16 states", 1e-5, 0.1, 1.0},  // rounded after every token
      // The oracle adds its terms one after the other, which a kernel does not.
      {"oracle of float32 by chunks", 5e-7, 2e-5, 2e-4, 3},
      // Of the state that is left where all was erased every algorithm has lost digits, the naive implementation too;
      // chunks lose some more, because they add what tokens wrote and erased (docs/numerics.md).
      {"fading float32 by chunks", 1e-6, 2e-2, 2e-1, 3},
  };
  const auto* const row =
      std::find_if(std::begin(table), std::end(table), [&](const auto& r) { return r.kind == kind; });
  if (row == std::end(table)) throw std::invalid_argument("no tolerance of " + std::string(kind));
  return *row;
}

struct Distance {
  double rms;      // relative RMS error
  double element;  // largest error of an element, relative to the larger of itself and the RMS of all
  std::size_t where;
};

// Returns infinity if the sizes differ or either side has a non-finite number. An expected value below the smallest
// normal float32 counts as that number, because float32 cannot be relatively exact there.
inline Distance distance(const std::vector<double>& got, const std::vector<double>& expected) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kTiny = std::numeric_limits<float>::min();
  if (got.size() != expected.size()) return {kInfinity, kInfinity, 0};
  double error = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i]) || !std::isfinite(expected[i])) return {kInfinity, kInfinity, i};
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  const double rms = std::sqrt(size / static_cast<double>(std::max<std::size_t>(got.size(), 1)));
  Distance result{std::sqrt(error / static_cast<double>(std::max<std::size_t>(got.size(), 1))) / std::max(rms, kTiny),
                  0, 0};
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double relative = std::abs(got[i] - expected[i]) / std::max({std::abs(expected[i]), rms, kTiny});
    if (relative > result.element) {
      result.element = relative;
      result.where = i;
    }
  }
  return result;
}

// Returns why `got` is too far from `expected`, or "" if it is not. `plain` is the result of the naive implementation.
inline std::string disagreement(const std::vector<double>& got, const std::vector<double>& expected,
                                const std::vector<double>& plain, const Tolerance& tolerance) {
  const Distance error = distance(got, expected);
  const double plain_error = distance(plain, expected).rms;
  if (!std::isfinite(plain_error)) return "the naive implementation gives no numbers to compare with";
  const double allowed = std::min(tolerance.factor * plain_error + tolerance.floor, tolerance.cap);
  if (error.rms <= allowed && error.element <= tolerance.element_cap) return "";
  std::ostringstream text;
  text << "relative RMS error " << error.rms << " (allowed " << allowed << ", naive implementation " << plain_error
       << "), element error " << error.element << " (allowed " << tolerance.element_cap << ')';
  if (got.size() != expected.size()) {
    text << ", got " << got.size() << " elements, expected " << expected.size();
  } else if (!got.empty()) {
    text << " at element " << error.where << ": got " << got[error.where] << ", expected " << expected[error.where];
  }
  return text.str();
}

}  // namespace efla::test
