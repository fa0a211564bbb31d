// The gradients of the token recurrence (equation 20 of EFLA, arXiv 2512.12602): the chunks of a query head from the
// last to the first, each in panels of value columns (recurrent_bwd_panel-inl.h).
#include "efla/cpu/delta/kernels.h"

#include <numeric>

#include "efla/cpu/common/thread_group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/recurrent_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/recurrent_bwd_panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Scratch for one query head, used by one thread or by a thread group. A group computes the panels of all value heads
// at once, each with its own sums. A single thread adds the sums of a panel before it starts the next panel.
struct BwdScratch {
  int group_threads;
  std::int64_t rows, key_stride, panels, heads;  // of a state, of a row, per value head, computed at a time
  std::int64_t chunk_floats;
  float* dstate;            // per value head panels [rows, kPanel]
  float* sums;              // PanelSums
  float* partials;          // PanelSums of every panel computed at a time
  float* thread_scratches;  // PanelScratch of every thread
  float* chunks;            // ChunkScratch of every value head computed at a time

  BwdScratch(Arena& arena, const DeltaShape& shape, Decay decay, int group_threads)
      : group_threads(group_threads),
        rows(state_rows(shape)),
        key_stride(round_up(shape.key_dim, kPanel)),
        panels(round_up(shape.value_dim, kPanel) / kPanel),
        heads(group_threads > 1 ? shape.group() : 1) {
    Arena one;
    ChunkScratch().lay_out(one, shape, decay);
    chunk_floats = static_cast<std::int64_t>(one.bytes() / sizeof(float));
    dstate = arena.floats(shape.group() * panels * rows * kPanel);
    sums = arena.floats(PanelSums::floats(key_stride, decay));
    partials = arena.floats(PanelSums::floats(key_stride, decay) * (group_threads > 1 ? heads * panels : 1));
    thread_scratches = arena.floats(PanelScratch::floats(rows) * group_threads);
    chunks = arena.floats(chunk_floats * heads);
  }

  ChunkScratch chunk(const DeltaShape& shape, Decay decay, std::int64_t head) const {
    Arena arena(reinterpret_cast<std::byte*>(chunks + head * chunk_floats));
    ChunkScratch scratch;
    scratch.lay_out(arena, shape, decay);
    return scratch;
  }
};

std::size_t RecurrentBwdBytes(const DeltaShape& shape, Decay decay, int group_threads) {
  Arena arena;
  const BwdScratch scratch(arena, shape, decay, group_threads);
  return arena.bytes();
}

// Returns the number of active threads of a group. A group is only useful if threads would have no head otherwise.
std::int64_t RecurrentBwdActiveThreads(const DeltaShape& shape, int group_threads) {
  if (shape.sequences() * shape.heads >= group_threads) return 0;
  return std::min<std::int64_t>(group_threads, shape.group() * (round_up(shape.value_dim, kPanel) / kPanel));
}

// Loads the panel at column `first` of a [K, V] state; zeros beyond K and V or without a state.
template <int Rank, class Float, class... Index>
HWY_INLINE void load_panel(const View<Float, Rank>& view, const DeltaShape& shape, std::int64_t first, float* panel,
                           Index... index) {
  const std::int64_t loaded = view ? shape.key_dim : 0;
  for (std::int64_t i = 0; i < loaded; ++i) {
    load_row(view.at(index..., i, first), view.stride[Rank - 1], std::min(kPanel, shape.value_dim - first), kPanel,
             panel + i * kPanel);
  }
  std::fill_n(panel + loaded * kPanel, (state_rows(shape) - loaded) * kPanel, 0.0F);
}

template <int Rank, class... Index>
HWY_INLINE void store_panel(const float* panel, const View<float, Rank>& view, const DeltaShape& shape,
                            std::int64_t first, Index... index) {
  if (!view) return;
  for (std::int64_t i = 0; i < shape.key_dim; ++i) {
    store_row(panel + i * kPanel, 1.0F, std::min(kPanel, shape.value_dim - first), view.at(index..., i, first),
              view.stride[Rank - 1]);
  }
}

// Computes one chunk of the panel at column `first` of a value head.
template <class T>
HWY_INLINE void panel_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                              const ChunkScratch& c, const PanelScratch& s, float* dstate, const PanelSums& sums) {
  const std::int64_t width = std::min(kPanel, p.shape.value_dim - first), rows = state_rows(p.shape);
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  load_panel(p.chunk_states, p.shape, first, s.states, at.i_b, saved, at.i_h);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const std::int64_t t = at.start + r;
    load_row(p.v.at(at.i_b, t, at.i_h, first), p.v.stride[3], width, kPanel, s.values + r * kPanel);
    load_row(p.dout.at(at.i_b, t, at.i_h, first), p.dout.stride[3], width, kPanel, s.dout + r * kPanel);
    for (std::int64_t j = 0; j < kPanel; ++j) s.dout[r * kPanel + j] *= scale;
  }
  if (p.rule.decay == Decay::none) {
    walk<false>(c, at.tokens, rows, s, dstate, sums);
  } else {
    walk<true>(c, at.tokens, rows, s, dstate, sums);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    store_row(s.values + r * kPanel, 1.0F, width, p.dv.at(at.i_b, at.start + r, at.i_h, first), p.dv.stride[3]);
  }
}

// Finishes a chunk of a value head: computes dbeta and dg from its sums over the panels and, through λ = ‖k‖², adds to
// dk.
template <class T>
HWY_INLINE void finish_head(const DeltaBackward<T>& p, const ChunkPlace& at, const ChunkScratch& c,
                            const PanelSums& sums) {
  const FloatTag d;
  const std::int64_t n = c.key_stride;
  const GainSlopes slopes = gain_slopes(p.rule.step, at.tokens, c.beta, c.lambda);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    finish_gains(p, at, r, sum_of(hn::Load(d, sums.da + r * kLanes)), sum_of(hn::Load(d, sums.db + r * kLanes)), c,
                 slopes, sums.dk + r * n);
    if (p.rule.decay == Decay::none) continue;
    const float* dg = sums.dg + r * n;
    float* out = p.dg.at(at.i_b, at.start + r, at.i_h);
    if (p.rule.decay == Decay::channel) {
      store_row(dg, 1.0F, p.shape.key_dim, out, p.dg.stride[3]);
    } else {
      *out = std::accumulate(dg, dg + p.shape.key_dim, 0.0F);
    }
  }
}

// Computes the chunk at `start` of value heads first … first + s.heads − 1. Adds their dq and dk to the sums, panel
// after panel in their order.
template <class T>
HWY_INLINE void chunk_of_heads(const DeltaBackward<T>& p, const Sequence& sequence, std::int64_t first,
                               std::int64_t start, float* dstate, const BwdScratch& s, ThreadPool& pool) {
  const Decay decay = p.rule.decay;
  const PanelSums sums(s.sums, s.key_stride, decay);
  const std::int64_t floats = PanelSums::floats(s.key_stride, decay);
  const auto place = [&](std::int64_t head) { return ChunkPlace(p.shape, sequence, first + head, start); };
  const auto partial = [&](std::int64_t unit) { return s.partials + (s.group_threads > 1 ? unit * floats : 0); };
  const auto compute = [&](std::int64_t unit, int thread) HWY_ATTR {
    const std::int64_t head = unit / s.panels, panel = unit % s.panels;
    panel_of_head(p, place(head), sequence.chunk(start), panel * kPanel, s.chunk(p.shape, decay, head),
                  PanelScratch(s.thread_scratches + thread * PanelScratch::floats(s.rows)),
                  dstate + unit * s.rows * kPanel, PanelSums(partial(unit), s.key_stride, decay));
  };
  pool.run(s.heads, [&](std::int64_t head, int) HWY_ATTR {
    ChunkScratch c = s.chunk(p.shape, decay, head);
    load_chunk(p, place(head), c);
  });
  if (s.group_threads > 1) pool.run(s.heads * s.panels, compute);
  for (std::int64_t head = 0; head < s.heads; ++head) {
    std::fill(sums.da, sums.dq, 0.0F);
    std::fill(sums.dg, sums.end, 0.0F);
    for (std::int64_t unit = head * s.panels; unit < (head + 1) * s.panels; ++unit) {
      if (s.group_threads == 1) compute(unit, 0);
      add_rows(partial(unit), floats, s.sums);
    }
    finish_head(p, place(head), s.chunk(p.shape, decay, head), sums);
  }
}

// Computes query head i_q of sequence n with all of its value heads, with `group_threads` threads of the pool; inside
// of a task with the calling thread alone.
template <class T>
void RecurrentBwdHead(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int group_threads,
                      ThreadPool& pool) {
  Arena arena(memory);
  const BwdScratch s(arena, p.shape, p.rule.decay, group_threads);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // rows beyond a chunk's tokens must hold finite numbers
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t group = p.shape.group(), panel_floats = s.rows * kPanel;
  const PanelSums sums(s.sums, s.key_stride, p.rule.decay);
  for (std::int64_t unit = 0; unit < group * s.panels; ++unit) {
    load_panel(p.dfinal_state, p.shape, unit % s.panels * kPanel, s.dstate + unit * panel_floats, n,
               i_q * group + unit / s.panels);
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::int64_t start = sequence.begin + chunk * kChunk;
    std::fill(sums.dq, sums.dg, 0.0F);
    for (std::int64_t i = 0; i < group; i += s.heads) {
      chunk_of_heads(p, sequence, i_q * group + i, start, s.dstate + i * s.panels * panel_floats, s, pool);
    }
    const ChunkPlace at(p.shape, sequence, i_q * group, start);
    const ChunkScratch c = s.chunk(p.shape, p.rule.decay, 0);
    for (std::int64_t r = 0; r < at.tokens; ++r) {
      finish_keys(p, at, r, c, sums.dq + r * s.key_stride, sums.dk + r * s.key_stride);
    }
  }
  for (std::int64_t unit = 0; unit < group * s.panels; ++unit) {
    store_panel(s.dstate + unit * panel_floats, p.dinitial_state, p.shape, unit % s.panels * kPanel, n,
                i_q * group + unit / s.panels);
  }
}

void RecurrentBwdFloat(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory,
                       int group_threads, ThreadPool& pool) {
  RecurrentBwdHead(p, n, i_q, memory, group_threads, pool);
}

void RecurrentBwdBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory,
                          int group_threads, ThreadPool& pool) {
  RecurrentBwdHead(p, n, i_q, memory, group_threads, pool);
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(RecurrentBwdFloat);
HWY_EXPORT(RecurrentBwdBfloat16);
HWY_EXPORT(RecurrentBwdBytes);
HWY_EXPORT(RecurrentBwdActiveThreads);

void head(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int group_threads,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdFloat)(p, n, i_q, memory, group_threads, pool);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int group_threads,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdBfloat16)(p, n, i_q, memory, group_threads, pool);
}

std::size_t head_bytes(const DeltaShape& shape, const DeltaRule& rule, int group_threads) {
  return HWY_DYNAMIC_DISPATCH(RecurrentBwdBytes)(shape, rule.decay, group_threads);
}

}  // namespace

std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return group_workspace_bytes(threads, [&](int group_threads) { return head_bytes(shape, rule, group_threads); });
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t active_threads = HWY_DYNAMIC_DISPATCH(RecurrentBwdActiveThreads)(p.shape, pool.threads());
  for_each_head(p.shape.sequences() * p.shape.heads, active_threads, workspace, pool,
                [&](std::int64_t i, std::byte* memory, int group_threads) {
                  head(p, i / p.shape.heads, i % p.shape.heads, memory, group_threads, pool);
                });
}

template void recurrent_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void recurrent_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
