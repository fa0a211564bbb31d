// The chunkwise forward (EFLA paper, equations 21 to 32; delta.h has the form that is computed).
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/chunk_fwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

struct FwdScratch {
  ChunkScratch chunk;
  float* state = nullptr;   // panels of [K, kPanel]
  float* values = nullptr;  // [kChunk, kPanel]
  float* u = nullptr;       // [kChunk, kPanel]
  float* out = nullptr;     // [kChunk, kPanel]

  void lay_out(Arena& arena, const DeltaShape& shape) {
    chunk.lay_out(arena, shape);
    state = arena.floats(shape.key_dim * round_up(shape.value_dim, kPanel));
    for (float** panel : {&values, &u, &out}) *panel = arena.floats(kChunk * kPanel);
  }
};

std::size_t FwdBytesPerWorker(const DeltaShape& shape) {
  Arena arena;
  FwdScratch().lay_out(arena, shape);
  return arena.bytes();
}

// One panel of O = scale (Q S + P U); the scale is left to the store.
struct OutputTiles {
  const ChunkScratch& s;
  std::int64_t key_dim;
  const float* state;  // [K, kPanel] before the chunk
  const float* u;      // [kChunk, kPanel]
  float* out;          // [kChunk, kPanel]

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const float* p = s.p_scores() + r * kChunk;
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(s.q + r * s.key_stride, s.key_stride, 1, state, kPanel, key_dim);
    tile.multiply_add(p, kChunk, 1, u, kPanel, r);
    tile.multiply_add_lower(p + r, kChunk, u + r * kPanel);
    tile.store(out + r * kPanel);
  }
};

// One chunk of one panel of value columns: writes its outputs and moves the panel's state on.
template <class T>
HWY_INLINE void panel_chunk(const DeltaForward<T>& p, const ChunkPlace& at, std::int64_t first, float* state,
                            FwdScratch& s) {
  const std::int64_t key_dim = p.shape.key_dim;
  const std::int64_t count = std::min(kPanel, p.shape.value_dim - first);
  if (p.chunk_states) {
    store_state_panel(state, p.chunk_states, first, key_dim, p.shape.value_dim, at.i_b, at.start / kChunk, at.i_h);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    load_row(p.v.at(at.i_b, at.start + r, at.i_h, first), p.v.stride[3], count, kPanel, s.values + r * kPanel);
  }
  SubstitutionTiles<false> substitution{s.chunk, key_dim, state, s.values, s.u, nullptr};
  for_tiles(at.tokens, substitution);
  OutputTiles output{s.chunk, key_dim, state, s.u, s.out};
  for_tiles(at.tokens, output);
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    store_row(s.out + r * kPanel, scale, count, p.o.at(at.i_b, at.start + r, at.i_h, first), p.o.stride[3]);
  }
  StateTiles next{s.chunk, at.tokens, s.u, state};
  for_tiles(key_dim, next);
}

// All tokens of one head, for the value panels [panel_begin, panel_end). A column's arithmetic does not depend on which
// other columns are computed beside it, so neither do its bits.
template <class T>
void ChunkFwdSlice(const DeltaForward<T>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t panel_begin,
                   std::int64_t panel_end, std::byte* memory) {
  Arena arena(memory);
  FwdScratch s;
  s.lay_out(arena, p.shape);
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    load_state_panel(p.initial_state, panel * kPanel, key_dim, value_dim, s.state + panel * kPanel * key_dim, i_b, i_h);
  }
  for (std::int64_t start = 0; start < p.shape.tokens; start += kChunk) {
    const ChunkPlace at{i_b, i_h, start, std::min(kChunk, p.shape.tokens - start)};
    load_chunk(p, at, s.chunk);
    compute_scores(at, key_dim, s.chunk);
    for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
      panel_chunk(p, at, panel * kPanel, s.state + panel * kPanel * key_dim, s);
    }
  }
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    store_state_panel(s.state + panel * kPanel * key_dim, p.final_state, panel * kPanel, key_dim, value_dim, i_b, i_h);
  }
}

void ChunkFwdSliceFloat(const DeltaForward<float>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t begin,
                        std::int64_t end, std::byte* memory) {
  ChunkFwdSlice(p, i_b, i_h, begin, end, memory);
}

void ChunkFwdSliceBfloat16(const DeltaForward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t begin,
                           std::int64_t end, std::byte* memory) {
  ChunkFwdSlice(p, i_b, i_h, begin, end, memory);
}

std::int64_t PanelWidth() { return kPanel; }

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(ChunkFwdSliceFloat);
HWY_EXPORT(ChunkFwdSliceBfloat16);
HWY_EXPORT(FwdBytesPerWorker);
HWY_EXPORT(PanelWidth);

void slice(const DeltaForward<float>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t begin, std::int64_t end,
           std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkFwdSliceFloat)(p, i_b, i_h, begin, end, memory);
}
void slice(const DeltaForward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t begin, std::int64_t end,
           std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkFwdSliceBfloat16)(p, i_b, i_h, begin, end, memory);
}

}  // namespace

std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, int threads) {
  return HWY_DYNAMIC_DISPATCH(FwdBytesPerWorker)(shape) * static_cast<std::size_t>(threads);
}

template <class T>
void chunk_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t heads = p.shape.batch * p.shape.heads;
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(PanelWidth)();
  const std::int64_t panels = (p.shape.value_dim + width - 1) / width;
  // Where heads are fewer than would keep the threads evenly busy, each is split into slices of value panels; a slice
  // costs the scores anew, so no more slices than needed.
  const std::int64_t wanted =
      pool.threads() == 1 || heads >= 4 * pool.threads() ? 1 : (2 * pool.threads() + heads - 1) / heads;
  const std::int64_t slices = std::min(panels, wanted);
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(heads * slices, [&](std::int64_t task, int worker) {
    const std::int64_t head = task / slices, i = task % slices;
    slice(p, head / p.shape.heads, head % p.shape.heads, panels * i / slices, panels * (i + 1) / slices,
          workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

template void chunk_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void chunk_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
