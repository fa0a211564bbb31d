// The forward of the chunk algorithm (equations 21 to 32 of EFLA, arXiv 2512.12602), on vector units. kernels.h has the
// equations as they are computed, docs/equations.md the derivation. A task has some value heads of a sequence, or a
// slice of their value columns (head_range.h), and computes them one after the other: chunk by chunk, and within a
// chunk panel by panel of value columns.
#include "efla/cpu/common/head_range.h"
#include "efla/cpu/common/prefetch_list.h"
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/chunk_fwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {
namespace {

struct FwdScratch {
  ChunkScratch chunk;
  PrefetchList prefetches;
  float* state = nullptr;   // panels [K, kPanel]
  float* values = nullptr;  // panels [kChunk, kPanel]
  float* out = nullptr;     // panels [kChunk, kPanel]
  float* u = nullptr;       // [kChunk, kPanel]

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay) {
    chunk.lay_out(arena, shape, decay);
    prefetches = PrefetchList(PrefetchList::lay_out(arena, prefetch_addresses(shape)));
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel);
    state = arena.floats(shape.key_dim * padded_values);
    for (float** panels : {&values, &out}) *panels = arena.floats(kChunk * padded_values);
    u = arena.floats(kChunk * kPanel);
  }
};

std::size_t FwdBytesPerWorker(const DeltaShape& shape, Decay decay) {
  Arena arena;
  FwdScratch().lay_out(arena, shape, decay);
  return arena.bytes();
}

// Computes one panel of O = scale (Q_read S + P U), without the scale, which the store applies.
struct OutputTiles {
  const ChunkScratch& s;
  std::int64_t key_dim;
  const float* state;  // [K, kPanel] before the chunk
  const float* u;      // [kChunk, kPanel]
  float* out;          // [kChunk, kPanel]
  PrefetchList& prefetches;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const float* p = s.p_scores() + r * kChunk;
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(s.q_read + r * s.key_stride, s.key_stride, 1, state, kPanel, key_dim, prefetches);
    tile.multiply_add(p, kChunk, 1, u, kPanel, r);
    tile.multiply_add_lower(p + r, kChunk, u + r * kPanel);
    tile.store(out + r * kPanel);
  }
};

// Computes one chunk of the panel at column v: its outputs and its next state.
HWY_NOINLINE void panel_chunk(std::int64_t tokens, std::int64_t key_dim, std::int64_t v, FwdScratch& s) {
  float* state = s.state + v * key_dim;
  SubstitutionTiles<false> substitution{s.chunk, key_dim, state, s.values + v * kChunk, s.u, nullptr, s.prefetches};
  for_tiles(tokens, substitution);
  OutputTiles output{s.chunk, key_dim, state, s.u, s.out + v * kChunk, s.prefetches};
  for_tiles(tokens, output);
  StateTiles next{s.chunk, tokens, s.u, state};
  for_tiles(key_dim, next);
}

// Computes all tokens of value head i_h, for the sequence and the value panels of the range. The arithmetic of
// a column, and so its bits, does not depend on the other columns.
template <class T>
HWY_INLINE void forward_head(const DeltaForward<T>& p, const HeadRange& range, std::int64_t i_h, FwdScratch& s) {
  const std::int64_t n = range.n, key_dim = p.shape.key_dim;
  const std::int64_t first = range.panel * kPanel, last = std::min(range.panel_end * kPanel, p.shape.value_dim);
  const Sequence sequence = sequence_of(p, n);
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  const bool streams = streams_states(p);
  const MicroSteps steps{steps_per_token(p)};
  load_state_panels(p.initial_state, first, last, key_dim, s.state, n, i_h);
  for (std::int64_t start = sequence.begin; start < sequence.end; start += kChunk) {
    const ChunkPlace at(p.shape, sequence, i_h, start, steps);
    load_chunk(p, at, s.chunk);
    compute_scores(at, key_dim, s.chunk);
    store_chunk_state(s.state, p.chunk_states, streams, first, last, key_dim, at.i_b, sequence.chunk(start), i_h);
    load_values(p.v, at, step_rows(at), first, last, 1.0F, s.values);
    plan_prefetches(p, {p.shape, sequence, i_h, start + kChunk, steps}, first, last, s.prefetches);
    for (std::int64_t v = first; v < last; v += kPanel) {
      panel_chunk(at.tokens, key_dim, v, s);
    }
    s.prefetches.prefetch_all();
    store_values(s.out, at, at.read(), first, last, scale, p.o);
  }
  store_state_panels(s.state, p.final_state, first, last, key_dim, n, i_h);
  if (streams) hwy::FlushStream();
}

template <class T>
void ChunkFwdRange(const DeltaForward<T>& p, const HeadRange& range, std::byte* memory) {
  Arena arena(memory);
  FwdScratch s;
  s.lay_out(arena, p.shape, p.rule.decay);
  for (std::int64_t i_h = range.head; i_h < range.head_end; ++i_h) forward_head(p, range, i_h, s);
}

void ChunkFwdFloat(const DeltaForward<float>& p, const HeadRange& range, std::byte* memory) {
  ChunkFwdRange(p, range, memory);
}

void ChunkFwdBfloat16(const DeltaForward<bfloat16>& p, const HeadRange& range, std::byte* memory) {
  ChunkFwdRange(p, range, memory);
}

std::int64_t PanelWidth() { return kPanel; }

}  // namespace
}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu::EFLA_KEYS {
namespace {

HWY_EXPORT(ChunkFwdFloat);
HWY_EXPORT(ChunkFwdBfloat16);
HWY_EXPORT(FwdBytesPerWorker);
HWY_EXPORT(PanelWidth);

void compute(const DeltaForward<float>& p, const HeadRange& range, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkFwdFloat)(p, range, memory);
}
void compute(const DeltaForward<bfloat16>& p, const HeadRange& range, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkFwdBfloat16)(p, range, memory);
}

}  // namespace

std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(FwdBytesPerWorker)(shape, rule.decay) * static_cast<std::size_t>(threads);
}

template <class T>
void chunk_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(PanelWidth)();
  for_each_head_range(p.shape, (p.shape.value_dim + width - 1) / width, workspace, pool,
                      [&](const HeadRange& range, std::byte* memory) { compute(p, range, memory); });
}

template void chunk_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void chunk_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu::EFLA_KEYS
#endif  // HWY_ONCE
