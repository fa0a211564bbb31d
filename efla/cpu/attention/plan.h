// How an attention problem is cut into tasks. The cut does not change the bits of the outputs: a row of q is computed
// block of keys by block of keys, and the sums of a segment are merged with the sums of all earlier segments, in the
// order of the text, whichever tasks compute them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "efla/cpu/common/workspace.h"
#include "efla/rule/attention.h"

namespace efla::cpu {

// Keys per segment. Segment i of a text has tokens [i · kAttentionSegment, (i + 1) · kAttentionSegment), so that the
// order of additions depends on positions alone.
inline constexpr std::int64_t kAttentionSegment = 8 * kAttentionBlock;

// New tokens [token, token_end) of a run, and heads [head, head_end) of keys and values with their query heads. The
// rows are numbered head after head, within a head token after token, within a token query head after query head.
struct AttentionRows {
  std::int64_t run = 0, row = 0;  // the run, and the row of q of its first token
  std::int64_t token = 0, token_end = 0, head = 0, head_end = 0;

  std::int64_t per_head(const AttentionShape& shape) const { return (token_end - token) * shape.group(); }
  std::int64_t count(const AttentionShape& shape) const { return (head_end - head) * per_head(shape); }
};

// Rows, and the segments [segment, segment_end) that a task computes for them. If `partial` ≥ 0, a task has one segment
// and stores its sums at this index of the partial sums. Otherwise it has all segments and stores the outputs.
struct AttentionTask {
  AttentionRows rows;
  std::int64_t segment = 0, segment_end = 0, partial = -1;
};

struct AttentionPlan {
  std::vector<AttentionRows> writes;  // of new keys and values into pages
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;  // rows whose segments are computed by several tasks; `partial`: of segment 0
  std::int64_t most_rows = 0;         // of a task
  std::int64_t partial_floats = 0;    // of all partial sums
};

// The sums of one segment, or of all segments so far, for some rows: the largest score, the sum of the weights
// relative to this score, and the weighted sum of the values.
struct AttentionSums {
  float* largest = nullptr;   // [rows]
  float* weights = nullptr;   // [rows]
  float* values = nullptr;    // [rows, value_stride]
  std::int64_t value_stride;  // V, rounded up to whole vectors

  AttentionSums(const AttentionShape& shape, Arena& arena, std::int64_t rows)
      : value_stride((shape.value_dim + 15) / 16 * 16) {
    largest = arena.floats(rows);
    weights = arena.floats(rows);
    values = arena.floats(rows * value_stride);
  }

  // Returns the sums of `rows` rows in memory of at least floats(shape, rows) floats.
  static AttentionSums at(const AttentionShape& shape, float* memory, std::int64_t rows) {
    Arena arena(reinterpret_cast<std::byte*>(memory));
    return AttentionSums(shape, arena, rows);
  }
  static std::int64_t floats(const AttentionShape& shape, std::int64_t rows) {
    Arena arena;
    AttentionSums(shape, arena, rows);
    return static_cast<std::int64_t>(arena.bytes() / sizeof(float));
  }
};

// Returns the plan for a pool of `threads` threads.
template <class S>
AttentionPlan plan_attention(const AttentionForward<S>& problem, int threads);

}  // namespace efla::cpu
