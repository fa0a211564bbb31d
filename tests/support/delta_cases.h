// The operator's test matrix: not every combination, but every value of every choice beside several values of the
// others.
#pragma once

#include <vector>

#include "tests/support/delta_case.h"

namespace efla::test {

inline std::vector<DeltaCase> delta_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases{
      // step, erase, write, l2norm,    B, T, H, K, V,   ‖k‖, layout,   initial state, final state, dfinal_state, scale
      {"exact", 1, 1, false, 2, 1, 3, 1, 1, 1, contiguous, true, true, true},
      {"exact", 1, 1, false, 1, 31, 2, 5, 16, 2, sliced, false, true, true},
      {"exact", 1, 1, false, 2, 32, 1, 16, 5, 2, head_major, true, false, true},
      {"exact", 1, 1, false, 1, 33, 3, 32, 32, 3, column_major, true, true, false},
      {"exact", 1, 1, false, 1, 63, 2, 64, 64, 1, reversed, true, true, true},
      {"exact", 1, 1, false, 1, 1000, 2, 64, 64, 4, sliced, true, true, true},
      {"exact", 1, 1, false, 1, 1000, 1, 16, 1, 2, contiguous, false, false, false},
      {"exact", 1, 1, false, 1, 64, 1, 128, 128, 2, head_major, true, true, true},
      {"exact", 1, 1, false, 1, 33, 1, 256, 256, 3, contiguous, false, true, true},
      {"exact", 1, 1, false, 1, 1000, 1, 128, 128, 3, sliced, true, true, true},
      {"exact", 1, 1, false, 1, 1000, 1, 5, 256, 1, head_major, true, true, true, -0.3},
      {"exact", 1, 1, false, 4, 31, 5, 8, 8, 2, column_major, true, true, true, 1},
      {"exact", 1, 1, false, 1, 32, 2, 100, 100, 10, reversed, true, true, true},
      {"exact", 1, 1, true, 1, 63, 2, 100, 64, 1, sliced, true, true, true},
      {"exact", 1, 1, true, 3, 33, 1, 16, 100, 5, column_major, false, false, false},
      {"exact", 1, 1, true, 1, 1000, 1, 32, 16, 1, reversed, false, true, true},
      {"exact", 2, 1, false, 1, 63, 2, 32, 5, 1, head_major, true, true, true},
      {"exact", 1, 0.5, false, 2, 33, 2, 5, 64, 2, sliced, true, true, true},
      {"exact", 0, 1, false, 1, 63, 2, 64, 32, 0.5, reversed, true, true, true},
      {"euler", 1, 1, true, 1, 1000, 1, 64, 64, 1, sliced, true, true, true},
      {"euler", 1, 1, true, 2, 31, 2, 128, 100, 3, contiguous, false, true, true},
      {"euler", 1, 1, false, 2, 32, 3, 5, 5, 1, head_major, true, true, false},
      {"euler", 2, 1, true, 1, 63, 2, 64, 16, 1, reversed, true, true, true},
      {"euler", 2, 1, false, 1, 1000, 1, 16, 32, 1, column_major, false, false, true},
      {"euler", 0, 1, true, 1, 33, 2, 16, 16, 1, contiguous, true, true, true},
      {"euler", 0, 1, false, 2, 1, 2, 100, 1, 1, sliced, true, true, true},
      {"euler", 1, 1, true, 1, 1000, 1, 256, 16, 1, contiguous, true, true, true, 0.3},
      {"rk2", 1, 1, false, 1, 63, 2, 32, 64, 1, sliced, true, true, true},
      {"rk2", 1, 1, true, 2, 31, 1, 64, 5, 1, contiguous, true, false, true},
      {"rk2", 1, 1, false, 1, 1, 3, 256, 16, 1, reversed, true, true, true},
      {"rk4", 1, 1, false, 1, 1000, 1, 32, 32, 1.5, head_major, true, true, true},
      {"rk4", 1, 1, true, 2, 33, 2, 16, 128, 1, sliced, false, true, false},
      {"rk4", 1, 2, false, 1, 32, 2, 100, 32, 1, contiguous, true, true, true},
      {"rk7", 1, 1, false, 2, 63, 1, 5, 100, 1.5, column_major, true, true, true},
      {"rk7", 1, 1, true, 1, 31, 3, 128, 16, 1, reversed, false, false, false},
      {"rk1", 1, 1, false, 1, 33, 2, 16, 16, 1, sliced, true, true, true},
      {"implicit_euler", 1, 1, false, 1, 1000, 1, 32, 64, 3, contiguous, true, true, true},
      {"implicit_euler", 1, 1, true, 2, 33, 2, 64, 100, 1, head_major, false, true, true},
      {"implicit_euler", 1, 1, false, 1, 1, 2, 16, 256, 10, sliced, true, true, true},
      {"trapezoid", 1, 1, false, 2, 33, 1, 256, 5, 3, contiguous, true, false, false},
      {"trapezoid", 1, 1, false, 1, 63, 2, 64, 64, 3, reversed, true, true, true},
      {"trapezoid", 1, 1, true, 1, 1000, 1, 16, 32, 1, sliced, true, true, true},
      {"trapezoid", 1, 1, false, 2, 31, 2, 1, 5, 0.5, contiguous, true, true, false},
  };
  for (const double norm : {0.0, 1e-8, 1e-3, 1e2, 1e4}) {
    cases.push_back({"exact", 1, 1, false, 2, 63, 2, 32, 16, norm, sliced, true, true, true});
    cases.push_back({"exact", 1, 1, true, 1, 33, 2, 16, 32, norm, contiguous, true, true, true});
    cases.push_back({"exact", 1, 1, false, 1, 33, 1, 5, 5, norm, head_major, false, true, true});
  }
  // Lengths around one and two chunks, with sizes that are no multiple of a vector.
  for (const std::int64_t tokens : {1, 31, 32, 33, 63}) {
    cases.push_back({"exact", 1, 1, false, 1, tokens, 2, 40, 24, 2, sliced, true, true, true});
  }
  return cases;
}

// Keys of one or two dimensions and strong erasure: every token erases most of what the ones before it wrote.
inline std::vector<DeltaCase> erasing_cases() {
  using enum Layout;
  return {
      {"exact", 1, 1, false, 2, 63, 2, 1, 5, 2, contiguous, true, true, true},
      {"exact", 1, 1, false, 2, 63, 2, 2, 5, 3, sliced, true, true, true},
      {"implicit_euler", 1, 1, false, 2, 63, 2, 2, 5, 3, head_major, true, true, true},
      {"trapezoid", 1, 1, false, 2, 31, 2, 1, 5, 2, contiguous, true, true, false},
  };
}

}  // namespace efla::test
