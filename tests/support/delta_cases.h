// The operator's test matrix: not every combination, but every value of every choice together with several values of
// the others.
#pragma once

#include <cmath>
#include <vector>

#include "tests/support/delta_case.h"

namespace efla::test {

// Whether float16 holds the results of a case, and what the chunkwise kernels multiply (docs/numerics.md).
inline bool float16_holds(const DeltaCase& c) {
  const bool long_keys = c.key_norm > 10, tiny_keys = !c.qk_l2norm && c.key_norm > 1e-8 && c.key_norm < 1e-3,
             short_keys = c.qk_l2norm && c.decay != Decay::channel && c.key_norm > 0 && c.key_norm < 0.1;
  return !long_keys && !tiny_keys && !short_keys && !(std::abs(c.scale) < 1e-3);
}

inline std::vector<DeltaCase> decay_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  const auto add = [&](DeltaCase c, Decay decay, double gate) {
    c.decay = decay;
    c.gate = gate;
    cases.push_back(c);
  };
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    for (const double gate : {0.0, 0.1, 1.0, 5.0, 20.0}) {  // 0: no decay; 20: nothing survives a few tokens
      add({"exact", 1, 1, false, 1, 100, 2, 32, 24, 2, sliced, true, true, true}, decay, gate);
      add({"euler", 1, 1, true, 2, 63, 1, 64, 16, 1, contiguous, true, true, true}, decay, gate);
    }
    for (const std::int64_t tokens : {1, 15, 16, 17, 31, 32, 33, 48}) {
      add({"exact", 1, 1, false, 1, tokens, 2, 40, 24, 2, head_major, true, true, true}, decay, 0.5);
    }
    for (const char* step : {"rk2", "rk4", "implicit_euler", "trapezoid"}) {
      add({step, 1, 1, true, 1, 45, 2, 16, 40, 1.5, reversed, true, true, true}, decay, 0.3);
      add({step, 1, 1, false, 1, 70, 1, 24, 8, 1, column_major, false, true, true}, decay, 2);
    }
    add({"exact", 1, 1, false, 1, 1000, 1, 128, 128, 3, sliced, true, true, true}, decay, 0.05);
    add({"euler", 1, 1, true, 1, 1000, 1, 64, 64, 1, contiguous, false, true, false}, decay, 0.01);
    add({"euler", 2, 1, true, 1, 63, 2, 100, 5, 1, sliced, true, true, true}, decay, 1);
    add({"euler", 0, 1, false, 1, 63, 2, 5, 100, 1, sliced, true, false, true}, decay, 1);
    add({"exact", 1, 0.5, false, 1, 33, 1, 256, 16, 2, contiguous, true, true, true}, decay, 0.2);
    add({"exact", 1, 1, false, 1, 40, 2, 3, 1, 2, contiguous, true, true, true}, decay, 0.2);
    // Products of such a scale with queries and decays are below the smallest number of AMX.
    add({"exact", 1, 1, false, 1, 64, 1, 64, 64, 1, contiguous, true, true, false, 1e-21}, decay, 1);
  }
  return cases;
}

inline std::vector<DeltaCase> grouped_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const std::int64_t group : {2, 3}) {
      for (const std::int64_t keys : {24, 64}) {  // 64: also for AMX, which takes multiples of 32
        DeltaCase c{"exact", 1, 1, group == 2, 2, 45, 2, keys, 40, 2, sliced, true, true, true};
        c.decay = decay;
        c.group = group;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Returns cases of packed sequences, some of them empty, some of them ending within a chunk.
inline std::vector<DeltaCase> packed_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const auto& ends : std::vector<std::vector<std::int64_t>>{
             {0, 90}, {0, 1, 33, 97}, {0, 0, 32, 64, 64, 65, 130, 130}, {0, 20, 40, 60, 80}}) {
      for (const std::int64_t keys : {16, 32}) {
        DeltaCase c{"exact", 1, 1, false, 1, ends.back(), 2, keys, 24, 2, sliced, true, true, true};
        c.decay = decay;
        c.cu_seqlens = ends;
        c.group = decay == Decay::scalar ? 2 : 1;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

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
      {"exact", 1, 1, true, 2, 70, 3, 96, 96, 2, contiguous, true, true, true, -0.3},
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
  for (const auto& more : {decay_cases(), grouped_cases(), packed_cases()}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

// Returns cases of rules with two keys.
inline std::vector<DeltaCase> two_key_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  const auto add = [&](DeltaCase c, Decay decay, EraseKey erase_key, std::int64_t group = 1) {
    c.decay = decay;
    c.erase_key = erase_key;
    c.group = group;
    cases.push_back(c);
  };
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const char* step : {"euler", "rk2", "rk4", "exact", "implicit_euler", "trapezoid"}) {
      add({step, 1, 1, true, 1, 70, 2, 40, 24, 1.5, sliced, true, true, true}, decay, EraseKey::gated, 2);
      add({step, 1, 1, false, 2, 45, 1, 64, 40, 1, column_major, true, true, true}, decay, EraseKey::gated);
      add({step, 1, 1, true, 1, 20, 2, 32, 16, 1, reversed, true, true, true}, decay, EraseKey::free);
    }
    for (const std::int64_t tokens : {1, 15, 16, 17, 31, 32, 33, 48}) {
      add({"exact", 1, 1, false, 1, tokens, 2, 24, 40, 2, head_major, true, true, true}, decay, EraseKey::gated);
    }
    for (const double norm : {0.0, 1e-8, 1e-3, 1e3, 1e4}) {
      add({"exact", 1, 1, false, 1, 33, 2, 32, 16, norm, contiguous, true, true, true}, decay, EraseKey::gated);
      add({"exact", 1, 1, true, 1, 33, 1, 16, 32, norm, sliced, true, true, true}, decay, EraseKey::gated);
    }
    add({"exact", 1, 1, false, 1, 1000, 1, 128, 128, 3, sliced, true, true, true}, decay, EraseKey::gated);
    add({"euler", 1, 1, true, 1, 1000, 1, 64, 64, 1, contiguous, false, true, false}, decay, EraseKey::gated);
    add({"exact", 1, 1, false, 1, 33, 1, 256, 256, 3, contiguous, false, true, true}, decay, EraseKey::gated);
    add({"euler", 2, 1, true, 1, 63, 2, 100, 5, 1, sliced, true, true, true}, decay, EraseKey::gated);
    add({"euler", 0, 1, false, 1, 63, 2, 5, 100, 1, sliced, true, false, true}, decay, EraseKey::gated, 3);
    add({"exact", 1, 0.5, false, 2, 40, 2, 3, 1, 2, contiguous, true, true, true}, decay, EraseKey::gated);
    DeltaCase packed{"exact", 1, 1, true, 1, 130, 2, 32, 24, 1, sliced, true, true, true};
    packed.cu_seqlens = {0, 0, 32, 64, 64, 65, 130, 130};
    add(packed, decay, EraseKey::gated, 2);
  }
  return cases;
}

// Returns cases of keys of one or two dimensions and strong erasure: every token erases most of the previous writes.
inline std::vector<DeltaCase> erasing_cases() {
  using enum Layout;
  return {
      {"exact", 1, 1, false, 2, 63, 2, 1, 5, 2, contiguous, true, true, true},
      {"exact", 1, 1, false, 2, 63, 2, 2, 5, 3, sliced, true, true, true},
      {"implicit_euler", 1, 1, false, 2, 63, 2, 2, 5, 3, head_major, true, true, true},
      {"trapezoid", 1, 1, false, 2, 31, 2, 1, 5, 2, contiguous, true, true, false},
      {"exact", 1, 1, false, 2, 63, 2, 1, 5, 100, contiguous, false, true, true},
  };
}

// Keys in two directions erase all of the state that was, and the last values are small: so is what is left, and all
// algorithms round relative to what was.
inline std::vector<DeltaCase> fading_cases() {
  std::vector<DeltaCase> cases;
  for (const bool qk_l2norm : {false, true}) {
    for (const double fade : {1e-2, 1e-4}) {
      DeltaCase c{qk_l2norm ? "euler" : "exact", 1, 1, qk_l2norm, 1, 96, 2, 128, 128, 3};
      c.final_state = c.dfinal_state = true;
      c.directions = 2;
      c.fade = fade;
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace efla::test
