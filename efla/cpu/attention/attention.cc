// Softmax attention, block of keys by block of keys, with the largest score so far and the sums relative to this score
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv 1805.02867; Dao et al.,
// "FlashAttention", 2022, arXiv 2205.14135). The rows of a task are the query heads of one head of keys and values, for
// neighbouring tokens, so that a block of keys and values is read once for all of them.
//
// A block's scores have one sum per row and key, over the channels in order. With m the largest score so far:
//
//   m' = max(m, max_s score_s),    w_s = e^{score_s − m'},    c = e^{m − m'}
//   W ← c W + Σ_s w_s,             O ← c O + Σ_s w_s v_s, the values in the order of the text
//
// At the end of a segment (plan.h) the sums m, W, O are merged with the sums of the earlier segments in the same way.
#include "efla/cpu/attention/attention.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/attention/attention.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/attention/row_tile-inl.h"
#include "efla/cpu/common/sigmoid-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();

// Channels of a block of keys that all rows go through before the next channels, so that they stay in the first-level
// cache.
constexpr std::int64_t kKeyDepth = 64;

struct TaskScratch {
  std::int64_t query_stride;
  float* q;             // [rows, query_stride]
  float* scores;        // [rows, kAttentionBlock], then the weights
  float* factors;       // [rows] c
  float* tail;          // [kAttentionBlock, kLanes] the last value columns, if they fill no vector
  std::int32_t* limit;  // [rows] keys of the block that a row uses
  AttentionSums segment, total;
  Ahead ahead = {};

  TaskScratch(const AttentionShape& shape, Arena& arena, std::int64_t rows)
      : query_stride(round_up(shape.key_dim, kLanes)),
        q(arena.floats(rows * query_stride)),
        scores(arena.floats(rows * kAttentionBlock)),
        factors(arena.floats(rows)),
        tail(arena.floats(kAttentionBlock * kLanes)),
        limit(reinterpret_cast<std::int32_t*>(arena.floats(rows))),
        segment(shape, arena, rows),
        total(shape, arena, rows) {}
};

std::size_t AttentionBytesPerWorker(const AttentionShape& shape, std::int64_t rows) {
  Arena arena;
  TaskScratch(shape, arena, rows);
  return arena.bytes();
}

// A block of kAttentionBlock keys and values of one head, of which rows use their first keys.
template <class S>
struct Block {
  const S* keys;  // [K, kAttentionBlock]
  std::int64_t key_stride;
  const S* values;        // [kAttentionBlock, V]
  std::int64_t row, end;  // the rows of the task that use the block
  const S* next_keys;     // of the block that the task computes next, or nothing
  std::int64_t unused;    // first keys that only their own rows use
};

// scores[r] += q_r · keys over the channels [begin, end), for rows of a tile.
template <class S>
struct ScoreTile {
  const Block<S>& block;
  TaskScratch& s;
  std::int64_t begin, end;

  template <int M>
  HWY_INLINE void run(std::int64_t row) const {
    constexpr int N = kTileVectors<M>;
    const std::int64_t keys = s.limit[row + M - 1];  // the limits ascend
    for (std::int64_t key = 0; key < keys; key += N * kLanes) {
      float* scores = s.scores + row * kAttentionBlock + key;
      RowTile<M, N> tile;
      begin == 0 ? tile.zero() : tile.load(scores, kAttentionBlock);
      tile.multiply_add(s.q + row * s.query_stride + begin, s.query_stride, block.keys + begin * block.key_stride + key,
                        block.key_stride, end - begin, s.ahead);
      tile.store(scores, kAttentionBlock);
    }
  }
};

// O ← c O + weights · values for a slice of N vectors of columns from `column` on, for rows of a tile.
template <int kWidth, class V>
struct ValueTile {
  TaskScratch& s;
  const V* values;  // the slice's first column
  std::int64_t value_stride, column;

  template <int M>
  HWY_INLINE void run(std::int64_t row) const {
    constexpr int N = std::min(kWidth, kTileVectors<M>);
    const float* weights = s.scores + row * kAttentionBlock;
    const std::int32_t* limit = s.limit + row;
    for (int n = 0; n < kWidth; n += N) {
      float* sums = s.segment.values + row * s.segment.value_stride + column + n * kLanes;
      RowTile<M, N> tile;
      tile.load(sums, s.segment.value_stride);
      tile.scale(s.factors + row);
      tile.multiply_add(weights, kAttentionBlock, values + n * kLanes, value_stride, limit[0], s.ahead);
      tile.multiply_add_rest(weights, kAttentionBlock, values + n * kLanes, value_stride, limit[0], limit);
      tile.store(sums, s.segment.value_stride);
    }
  }
};

// Replaces the scores [unused, limit) of a row, products q·k, by their weights, and the ones before by 0. Updates the
// largest score and the sum of the weights, and returns c. Not inlined, so that the compiler fuses the same products
// and sums for every caller.
HWY_NOINLINE float weigh(float* HWY_RESTRICT scores, std::int64_t unused, std::int64_t limit, float scale,
                         float& largest, float& weights) {
  const FloatTag d;
  const auto used_of = [&](std::int64_t i) HWY_ATTR {
    const auto first = hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(0, unused - i)));
    return hn::AndNot(first, hn::FirstN(d, static_cast<std::size_t>(limit - i)));
  };
  FloatVec most = hn::Set(d, largest);
  for (std::int64_t i = 0; i < limit; i += kLanes) {
    const auto used = used_of(i);
    const FloatVec score = hn::Mul(hn::Set(d, scale), hn::Load(d, scores + i));
    hn::Store(score, d, scores + i);
    most = hn::Max(most, hn::IfThenElse(used, score, hn::Set(d, kLowest)));
  }
  const float next = hn::GetLane(hn::MaxOfLanes(d, most));
  FloatVec sum = hn::Zero(d);
  for (std::int64_t i = 0; i < limit; i += kLanes) {
    const auto used = used_of(i);
    const FloatVec weight = exp_of_negative(d, hn::Sub(hn::Load(d, scores + i), hn::Set(d, next)));
    hn::Store(hn::IfThenElseZero(used, weight), d, scores + i);
    sum = hn::Add(sum, hn::IfThenElseZero(used, weight));
  }
  const hn::CappedTag<float, 1> d1;
  const float factor = hn::GetLane(exp_of_negative(d1, hn::Set(d1, largest - next)));
  largest = next;
  weights = weights * factor + hn::GetLane(hn::SumOfLanes(d, sum));
  return factor;
}

// Computes the block for all of its rows.
template <class S>
HWY_INLINE void attend_block(const AttentionShape& shape, const Block<S>& block, float scale, TaskScratch& s) {
  const std::int64_t row = block.row, end = block.end;
  s.ahead = Ahead(block.values, s.limit[end - 1] * shape.value_dim);
  for (std::int64_t i = 0; i < shape.key_dim; i += kKeyDepth) {
    for_row_tiles(row, end, ScoreTile<S>{block, s, i, std::min(i + kKeyDepth, shape.key_dim)});
  }
  for (std::int64_t r = row; r < end; ++r) {
    const auto unused = std::min<std::int64_t>(block.unused, s.limit[r] - 1);
    s.factors[r] =
        weigh(s.scores + r * kAttentionBlock, unused, s.limit[r], scale, s.segment.largest[r], s.segment.weights[r]);
  }
  s.ahead = Ahead(block.next_keys, shape.key_dim * kAttentionBlock);
  std::int64_t j = 0;
  for (; j + kSlice <= shape.value_dim; j += kSlice) {
    for_row_tiles(row, end, ValueTile<kSliceVectors, S>{s, block.values + j, shape.value_dim, j});
  }
  for (; j + kLanes <= shape.value_dim; j += kLanes) {
    for_row_tiles(row, end, ValueTile<1, S>{s, block.values + j, shape.value_dim, j});
  }
  if (j == shape.value_dim) return;
  for (std::int64_t key = 0; key < s.limit[end - 1]; ++key) {
    load_row(block.values + key * shape.value_dim + j, 1, shape.value_dim - j, kLanes, s.tail + key * kLanes);
  }
  for_row_tiles(row, end, ValueTile<1, float>{s, s.tail, kLanes, j});
}

// Merges the sums of a segment into the sums of all earlier segments, for rows [begin, end).
HWY_NOINLINE void merge_rows(const AttentionSums& segment, std::int64_t begin, std::int64_t end,
                             const AttentionSums& total) {
  const FloatTag d;
  const hn::CappedTag<float, 1> d1;
  for (std::int64_t r = begin; r < end; ++r) {
    const float largest = std::max(total.largest[r], segment.largest[r]);
    const float before = hn::GetLane(exp_of_negative(d1, hn::Set(d1, total.largest[r] - largest)));
    const float now = hn::GetLane(exp_of_negative(d1, hn::Set(d1, segment.largest[r] - largest)));
    total.largest[r] = largest;
    total.weights[r] = total.weights[r] * before + segment.weights[r] * now;
    float* sums = total.values + r * total.value_stride;
    const float* added = segment.values + r * segment.value_stride;
    for (std::int64_t j = 0; j < total.value_stride; j += kLanes) {
      const FloatVec old = hn::Mul(hn::Load(d, sums + j), hn::Set(d, before));
      hn::Store(hn::MulAdd(hn::Load(d, added + j), hn::Set(d, now), old), d, sums + j);
    }
  }
}

HWY_INLINE void clear(const AttentionSums& sums, std::int64_t rows) {
  std::fill_n(sums.largest, rows, kLowest);
  std::fill_n(sums.weights, rows, 0.0F);
  std::fill_n(sums.values, rows * sums.value_stride, 0.0F);
}

// Calls f(row, end, head) per head for the task's rows whose token is at least `token` of the text.
template <class S, class F>
HWY_INLINE void for_heads(const AttentionForward<S>& p, const AttentionRows& rows, std::int64_t token, const F& f) {
  const std::int64_t first = p.runs[static_cast<std::size_t>(rows.run)].begin + rows.token;
  const std::int64_t skipped = std::max<std::int64_t>(0, token - first) * p.shape.group();
  const std::int64_t per_head = rows.per_head(p.shape);
  for (std::int64_t head = rows.head; head < rows.head_end; ++head) {
    const std::int64_t row = (head - rows.head) * per_head;
    f(row + skipped, row + per_head, head);
  }
}

// Computes the sums of one segment for the task's rows.
template <class S>
HWY_INLINE void attend_segment(const AttentionForward<S>& p, const AttentionRows& rows, std::int64_t segment,
                               TaskScratch& s) {
  const AttentionShape& shape = p.shape;
  const AttentionRun<S>& run = p.runs[static_cast<std::size_t>(rows.run)];
  const std::int64_t per_head = rows.per_head(shape), first = run.begin + rows.token, last = run.begin + rows.token_end;
  const std::int64_t begin = segment * kAttentionSegment, end = std::min(begin + kAttentionSegment, last);
  const auto scale = static_cast<float>(p.scale_or_default());
  const auto keys = [&](std::int64_t key, std::int64_t head) HWY_ATTR {
    return key_matrix(shape, run, key / shape.page_tokens, head) + key % shape.page_tokens;
  };
  clear(s.segment, rows.count(shape));
  for (std::int64_t key = begin; key < end; key += kAttentionBlock) {
    for (std::int64_t r = 0; r < rows.count(shape); ++r) {
      s.limit[r] = static_cast<std::int32_t>(std::min(kAttentionBlock, first + r % per_head / shape.group() + 1 - key));
    }
    for_heads(p, rows, key, [&](std::int64_t row, std::int64_t row_end, std::int64_t head) HWY_ATTR {
      const S* values = value_matrix(shape, run, key / shape.page_tokens, head);
      const std::int64_t next = key + kAttentionBlock;
      const S* next_keys = head + 1 < rows.head_end ? keys(key, head + 1)
                           : next < last            ? keys(next, rows.head)
                                                    : nullptr;
      attend_block(shape,
                   Block<S>{keys(key, head), shape.page_tokens, values + key % shape.page_tokens * shape.value_dim, row,
                            row_end, next_keys, std::max<std::int64_t>(0, p.first_key - key)},
                   scale, s);
    });
  }
}

// Returns the row of q and of o, and the query head, of a row of a task.
struct QueryPlace {
  std::int64_t row, head;

  QueryPlace(const AttentionShape& shape, const AttentionRows& rows, std::int64_t r)
      : row(rows.row + rows.token + r % rows.per_head(shape) / shape.group()),
        head((rows.head + r / rows.per_head(shape)) * shape.group() + r % shape.group()) {}
};

template <class S>
HWY_INLINE void load_queries(const AttentionForward<S>& p, const AttentionRows& rows, TaskScratch& s) {
  for (std::int64_t r = 0; r < rows.count(p.shape); ++r) {
    const QueryPlace at(p.shape, rows, r);
    load_row(p.q.at(at.row, at.head), p.q.stride[2], p.shape.key_dim, s.query_stride, s.q + r * s.query_stride);
  }
}

// Stores O / W of all rows.
template <class S>
HWY_INLINE void store_outputs(const AttentionForward<S>& p, const AttentionRows& rows, const AttentionSums& total) {
  const FloatTag d;
  for (std::int64_t r = 0; r < rows.count(p.shape); ++r) {
    float* sums = total.values + r * total.value_stride;
    for (std::int64_t j = 0; j < total.value_stride; j += kLanes) {
      hn::Store(hn::Div(hn::Load(d, sums + j), hn::Set(d, total.weights[r])), d, sums + j);
    }
    const QueryPlace at(p.shape, rows, r);
    store_row(sums, 1.0F, p.shape.value_dim, p.o.at(at.row, at.head), p.o.stride[2]);
  }
}

// Merges the sums of a segment into the sums of all earlier segments, for the task's rows that use the segment.
template <class S>
HWY_INLINE void merge(const AttentionForward<S>& p, const AttentionRows& rows, std::int64_t segment,
                      const AttentionSums& sums, const AttentionSums& total) {
  for_heads(p, rows, segment * kAttentionSegment,
            [&](std::int64_t row, std::int64_t end, std::int64_t) HWY_ATTR { merge_rows(sums, row, end, total); });
}

template <class S>
HWY_INLINE void run_task(const AttentionForward<S>& p, const AttentionTask& task, std::byte* memory, float* partials) {
  Arena arena(memory);
  const std::int64_t count = task.rows.count(p.shape);
  TaskScratch s(p.shape, arena, count);
  load_queries(p, task.rows, s);
  if (task.partial >= 0) {
    s.segment = AttentionSums::at(p.shape, partials + task.partial, count);
    return attend_segment(p, task.rows, task.segment, s);
  }
  clear(s.total, count);
  for (std::int64_t segment = task.segment; segment < task.segment_end; ++segment) {
    attend_segment(p, task.rows, segment, s);
    merge(p, task.rows, segment, s.segment, s.total);
  }
  store_outputs(p, task.rows, s.total);
}

// Merges the partial sums of all segments of a task that was split.
template <class S>
HWY_INLINE void merge_task(const AttentionForward<S>& p, const AttentionTask& task, std::byte* memory,
                           float* partials) {
  Arena arena(memory);
  const std::int64_t count = task.rows.count(p.shape);
  const AttentionSums total(p.shape, arena, count);
  clear(total, count);
  float* partial = partials + task.partial;
  for (std::int64_t segment = 0; segment < task.segment_end; ++segment) {
    merge(p, task.rows, segment, AttentionSums::at(p.shape, partial, count), total);
    partial += AttentionSums::floats(p.shape, count);
  }
  store_outputs(p, task.rows, total);
}

void AttentionTaskFloat(const AttentionForward<float>& p, const AttentionTask& task, std::byte* memory,
                        float* partials) {
  run_task(p, task, memory, partials);
}
void AttentionTaskBfloat16(const AttentionForward<bfloat16>& p, const AttentionTask& task, std::byte* memory,
                           float* partials) {
  run_task(p, task, memory, partials);
}
void AttentionMergeFloat(const AttentionForward<float>& p, const AttentionTask& task, std::byte* memory,
                         float* partials) {
  merge_task(p, task, memory, partials);
}
void AttentionMergeBfloat16(const AttentionForward<bfloat16>& p, const AttentionTask& task, std::byte* memory,
                            float* partials) {
  merge_task(p, task, memory, partials);
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(AttentionBytesPerWorker);
HWY_EXPORT(AttentionTaskFloat);
HWY_EXPORT(AttentionTaskBfloat16);
HWY_EXPORT(AttentionMergeFloat);
HWY_EXPORT(AttentionMergeBfloat16);

void run_task(const AttentionForward<float>& p, const AttentionTask& task, std::byte* memory, float* partials) {
  HWY_DYNAMIC_DISPATCH(AttentionTaskFloat)(p, task, memory, partials);
}
void run_task(const AttentionForward<bfloat16>& p, const AttentionTask& task, std::byte* memory, float* partials) {
  HWY_DYNAMIC_DISPATCH(AttentionTaskBfloat16)(p, task, memory, partials);
}
void merge_task(const AttentionForward<float>& p, const AttentionTask& task, std::byte* memory, float* partials) {
  HWY_DYNAMIC_DISPATCH(AttentionMergeFloat)(p, task, memory, partials);
}
void merge_task(const AttentionForward<bfloat16>& p, const AttentionTask& task, std::byte* memory, float* partials) {
  HWY_DYNAMIC_DISPATCH(AttentionMergeBfloat16)(p, task, memory, partials);
}

// Writes the keys and values of new tokens of one head into the page.
template <class S>
void write_pages(const AttentionForward<S>& p, const AttentionRows& rows) {
  const AttentionShape& shape = p.shape;
  const AttentionRun<S>& run = p.runs[static_cast<std::size_t>(rows.run)];
  const std::int64_t tokens = rows.token_end - rows.token, first = run.begin + rows.token;
  const std::int64_t page = first / shape.page_tokens, at = first % shape.page_tokens;
  S* keys = key_matrix(shape, run, page, rows.head) + at;
  S* values = value_matrix(shape, run, page, rows.head) + at * shape.value_dim;
  const float* from = p.k.at(rows.row + rows.token, rows.head);
  for (std::int64_t i = 0; i < shape.key_dim; ++i, keys += shape.page_tokens, from += p.k.stride[2]) {
    for (std::int64_t t = 0; t < tokens; ++t) keys[t] = from_state<S>(from[t * p.k.stride[0]]);
  }
  for (std::int64_t t = 0; t < tokens; ++t, values += shape.value_dim) {
    const float* value = p.v.at(rows.row + rows.token + t, rows.head);
    for (std::int64_t j = 0; j < shape.value_dim; ++j) values[j] = from_state<S>(value[j * p.v.stride[2]]);
  }
}

// Calls task(i, worker) for every i in [0, count), distributed over the threads if the work is long compared with
// waking a thread.
template <class Task>
void run_tasks(std::int64_t count, double work, ThreadPool& pool, const Task& task) {
  constexpr double kLeastShared = 1 << 16, kLeastSharedAwake = 1 << 14;
  if (work >= (pool.in_use() ? kLeastSharedAwake : kLeastShared)) return pool.run(count, task);
  pool.run(1, [&](std::int64_t, int worker) {
    for (std::int64_t i = 0; i < count; ++i) task(i, worker);
  });
}

}  // namespace

std::size_t attention_workspace_bytes(const AttentionShape& shape, const AttentionPlan& plan, int threads) {
  return HWY_DYNAMIC_DISPATCH(AttentionBytesPerWorker)(shape, plan.most_rows) * static_cast<std::size_t>(threads) +
         static_cast<std::size_t>(plan.partial_floats) * sizeof(float);
}

template <class S>
void attention(const AttentionForward<S>& p, const AttentionPlan& plan, Workspace workspace, ThreadPool& pool) {
  const std::size_t bytes = HWY_DYNAMIC_DISPATCH(AttentionBytesPerWorker)(p.shape, plan.most_rows);
  auto* partials = reinterpret_cast<float*>(workspace.data + bytes * static_cast<std::size_t>(pool.threads()));
  const auto memory = [&](int worker) { return workspace.data + bytes * static_cast<std::size_t>(worker); };
  const auto size = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  // Elements that are read or written.
  const auto token = static_cast<double>(p.shape.key_value_heads * (p.shape.key_dim + p.shape.value_dim));
  double tokens = 0;
  for (const auto& run : p.runs) tokens += static_cast<double>(run.begin + run.tokens);
  run_tasks(size(plan.writes), token * static_cast<double>(p.rows()), pool,
            [&](std::int64_t i, int) { write_pages(p, plan.writes[static_cast<std::size_t>(i)]); });
  run_tasks(size(plan.tasks), token * tokens, pool, [&](std::int64_t i, int worker) {
    run_task(p, plan.tasks[static_cast<std::size_t>(i)], memory(worker), partials);
  });
  run_tasks(size(plan.merges), static_cast<double>(plan.partial_floats), pool, [&](std::int64_t i, int worker) {
    merge_task(p, plan.merges[static_cast<std::size_t>(i)], memory(worker), partials);
  });
}

template void attention(const AttentionForward<float>&, const AttentionPlan&, Workspace, ThreadPool&);
template void attention(const AttentionForward<bfloat16>&, const AttentionPlan&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
