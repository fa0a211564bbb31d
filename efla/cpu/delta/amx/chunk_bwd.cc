// The backward of the chunk algorithm (chunk_bwd.cc) with its matrix products on AMX (amx/bf16_split-inl.h).
// amx/bwd_values-inl.h and amx/bwd_keys-inl.h compute a chunk of a value head. This file distributes the heads: a task
// has some query heads of a sequence with all of their value heads, or, if there are few query heads, one value head of
// a chunk.
#include "efla/cpu/common/head_range.h"
#include "efla/cpu/delta/amx/amx.h"
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/amx/chunk_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk_bwd_tiles-inl.h"

#if HWY_TARGET == HWY_AVX3 && !defined(EFLA_NO_AMX)
#include "efla/cpu/delta/amx/bwd_keys-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Scratch for some query heads of a sequence with their value heads.
struct HeadsScratch {
  AmxBwdScratch chunk;
  std::int64_t state_floats, partial_floats;
  float* dstate;    // per value head panels [K, kPanel] of dS
  float* partials;  // [2 kChunk, Kp] dq and dk: the sums over value heads, and the current value head's

  HeadsScratch(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t query_heads)
      : state_floats(shape.key_dim * round_up(shape.value_dim, kPanel)), partial_floats(2 * kChunk * shape.key_dim) {
    chunk.lay_out(arena, shape, decay, kStateSplits<float>);
    dstate = arena.floats(query_heads * shape.group() * state_floats);
    partials = arena.floats(2 * partial_floats);
  }
};

// Plans prefetches of the rows that the chunk at `next` reads and writes, and of the state before this chunk.
template <Decay kDecay, class T>
HWY_INLINE void plan_prefetches(const DeltaBackward<T>& p, const ChunkPlace& next, std::int64_t saved,
                                RowPrefetches& prefetches) {
  prefetches.clear();
  const std::int64_t i_b = next.i_b, t = next.start, tokens = next.tokens, i_q = next.i_q, i_h = next.i_h;
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  if (kDecay == Decay::channel && p.g.stride[3] == 1) {
    prefetches.add(p.g.at(i_b, t, i_h), p.g.stride[1], tokens, key_dim);
  }
  if (p.q.stride[3] == 1) prefetches.add(p.q.at(i_b, t, i_q), p.q.stride[1], tokens, key_dim);
  if (p.k.stride[3] == 1) prefetches.add(p.k.at(i_b, t, i_q), p.k.stride[1], tokens, key_dim);
  if (p.v.stride[3] == 1) prefetches.add(p.v.at(i_b, t, i_h), p.v.stride[1], tokens, value_dim);
  if (p.dout.stride[3] == 1) prefetches.add(p.dout.at(i_b, t, i_h), p.dout.stride[1], tokens, value_dim);
  if (p.dq.stride[3] == 1) prefetches.add(p.dq.at(i_b, t, i_q), p.dq.stride[1], tokens, key_dim);
  if (p.dk.stride[3] == 1) prefetches.add(p.dk.at(i_b, t, i_q), p.dk.stride[1], tokens, key_dim);
  if (p.dv.stride[3] == 1) prefetches.add(p.dv.at(i_b, t, i_h), p.dv.stride[1], tokens, value_dim);
  if (p.chunk_states.stride[4] == 1) {
    prefetches.add(p.chunk_states.at(i_b, saved, i_h), p.chunk_states.stride[3], key_dim, value_dim);
  }
  if (kDecay == Decay::channel && p.dg.stride[3] == 1) {
    prefetches.add(p.dg.at(i_b, t, i_h), p.dg.stride[1], tokens, key_dim);
  }
}

// Computes one chunk of one value head. Writes dq and dk [kChunk, K], and replaces dstate, the gradient of the state
// after the chunk, by the gradient of the state before the chunk.
template <Decay kDecay, int kKeySplits, class T>
void chunk_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, const Sequence& sequence, float scale,
                   float* dstate, AmxBwdScratch& s, float* dq, float* dk) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t saved = sequence.chunk(at.start), rest = (kChunk - at.tokens) * kPanel;
  load_keys<kDecay, kKeySplits>(p, at, s);
  load_values(p.v, at, step_rows(at), 0, value_dim, 1.0F, s.values);
  load_values(p.dout, at, step_rows(at), 0, value_dim, 1.0F, s.dout);
  for (std::int64_t v = 0; v < value_dim; v += kPanel) {
    for (float* panels : {s.values, s.dout}) std::fill_n(panels + v * kChunk + at.tokens * kPanel, rest, 0.0F);
    value_panel<kDecay, kKeySplits>(p, at, saved, v, scale, dstate + v * key_dim, s);
  }
  store_values(s.values, at, step_rows(at), 0, value_dim, scale, p.dv);
  score_gradients<kDecay, T>(scale, s);
  if constexpr (kDecay == Decay::channel) {
    decayed_key_gradients<kKeySplits, T>(key_dim, scale, s, dq, dk);
    finish_decayed_keys<kKeySplits>(at.tokens, s, dq, dk);
    finish_decay(p, at, s.chunk.decay, s.gradient);
  } else {
    key_gradients<kDecay, kKeySplits, T>(key_dim, scale, s, dq, dk);
  }
  finish_chunk(p, at, scale, s, dk);
  if constexpr (kDecay == Decay::scalar) finish_scalar_decay(p, at, scale, s);
}

// Computes dq and dk of a chunk's tokens from their sums over value heads, applies the L2 norm and stores them.
template <class T>
HWY_INLINE void store_keys(const DeltaBackward<T>& p, const ChunkPlace& at, const AmxBwdScratch& s, float* dq,
                           float* dk) {
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    finish_keys(p, at, r, s.chunk, dq + r * p.shape.key_dim, dk + r * p.shape.key_dim);
  }
}

HWY_INLINE void scale_state(float* state, std::int64_t count, float by) {
  for (std::int64_t i = 0; i < count; ++i) state[i] *= by;
}

// Load dS after the last token of a value head, divided by the scale; store dS before the first token, times the scale.
template <class T>
HWY_INLINE void load_final(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h, float scale,
                           std::int64_t state_floats, float* dstate) {
  load_state_panels(p.dfinal_state, 0, p.shape.value_dim, p.shape.key_dim, dstate, n, i_h);
  if (p.dfinal_state) scale_state(dstate, state_floats, 1.0F / scale);
}
template <class T>
HWY_INLINE void store_initial(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h, float scale,
                              std::int64_t state_floats, float* dstate) {
  if (p.dinitial_state) scale_state(dstate, state_floats, scale);
  store_state_panels(dstate, p.dinitial_state, 0, p.shape.value_dim, p.shape.key_dim, n, i_h);
}

// Computes query heads [range.head, range.head_end) of a sequence with all of their value heads, chunk by chunk and
// within a chunk head by head, because rows of neighbouring heads lie beside each other in memory.
template <class T, int kKeySplits, Decay kDecay>
void BackwardRange(const DeltaBackward<T>& p, const HeadRange& range, std::byte* memory) {
  const TilesInUse tiles;
  Arena arena(memory);
  HeadsScratch s(arena, p.shape, p.rule.decay, range.head_end - range.head);
  const Sequence sequence = sequence_of(p, range.n);
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim, group = p.shape.group();
  const std::int64_t head = range.head * group, head_end = range.head_end * group;  // value heads
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  const auto dstate = [&](std::int64_t i_h) { return s.dstate + (i_h - head) * s.state_floats; };
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    load_final(p, range.n, i_h, scale, s.state_floats, dstate(i_h));
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t start = sequence.begin + (chunks - 1) * kChunk; start >= sequence.begin; start -= kChunk) {
    for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
      const ChunkPlace at(p.shape, sequence, i_h, start);
      const bool more_heads = i_h + 1 < head_end, first_of_group = i_h % group == 0;
      const std::int64_t next = more_heads ? start : start - kChunk;
      s.chunk.prefetches.clear();
      if (next >= sequence.begin) {
        plan_prefetches<kDecay>(p, {p.shape, sequence, more_heads ? i_h + 1 : head, next}, sequence.chunk(next),
                                s.chunk.prefetches);
      }
      float *dq = s.partials + (first_of_group ? 0 : s.partial_floats), *dk = dq + s.partial_floats / 2;
      chunk_of_head<kDecay, kKeySplits>(p, at, sequence, scale, dstate(i_h), s.chunk, dq, dk);
      if (!first_of_group) add_rows(s.partials + s.partial_floats, s.partial_floats, s.partials);
      if ((i_h + 1) % group == 0) store_keys(p, at, s.chunk, s.partials, s.partials + s.partial_floats / 2);
    }
  }
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    store_initial(p, range.n, i_h, scale, s.state_floats, dstate(i_h));
  }
}

// Scratch for the value heads of one query head, which are distributed to threads chunk by chunk.
struct GroupScratch {
  std::int64_t state_floats, partial_floats;
  float* dstate;    // per value head panels [K, kPanel] of dS
  float* partials;  // per value head [2 kChunk, Kp] dq and dk
  std::byte* thread_scratches;
  std::size_t thread_bytes;  // bytes of a thread's AmxBwdScratch

  GroupScratch(Arena& arena, const DeltaShape& shape, Decay decay, int threads)
      : state_floats(shape.key_dim * round_up(shape.value_dim, kPanel)), partial_floats(2 * kChunk * shape.key_dim) {
    dstate = arena.floats(shape.group() * state_floats);
    partials = arena.floats(shape.group() * partial_floats);
    Arena one;
    AmxBwdScratch().lay_out(one, shape, decay, kStateSplits<float>);
    thread_bytes = one.bytes();
    thread_scratches =
        reinterpret_cast<std::byte*>(arena.floats(static_cast<std::int64_t>(thread_bytes / sizeof(float)) * threads));
  }
  AmxBwdScratch scratch(const DeltaShape& shape, Decay decay, int i) const {
    Arena arena(thread_scratches + thread_bytes * static_cast<std::size_t>(i));
    AmxBwdScratch s;
    s.lay_out(arena, shape, decay, kStateSplits<float>);
    return s;
  }
};

// Computes query head i_q of sequence n with all of its value heads, with all threads of the pool. dq and dk are added
// in the order of the heads, so that one thread and several threads give the same bits.
template <class T, int kKeySplits, Decay kDecay>
void BackwardGroup(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool) {
  Arena arena(memory);
  const GroupScratch s(arena, p.shape, p.rule.decay, pool.threads());
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t group = p.shape.group(), head = i_q * group;
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  const auto dstate = [&](std::int64_t i) { return s.dstate + i * s.state_floats; };
  for (std::int64_t i = 0; i < group; ++i) load_final(p, n, head + i, scale, s.state_floats, dstate(i));
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t start = sequence.begin + (chunks - 1) * kChunk; start >= sequence.begin; start -= kChunk) {
    int with_keys = 0;  // a thread that has loaded the keys of the chunk
    pool.run(group, [&](std::int64_t i, int thread) HWY_ATTR {
      const TilesInUse tiles;
      AmxBwdScratch scratch = s.scratch(p.shape, p.rule.decay, thread);
      const ChunkPlace at(p.shape, sequence, head + i, start);
      const std::int64_t next = start - kChunk;
      if (next >= sequence.begin) {
        plan_prefetches<kDecay>(p, {p.shape, sequence, head + i, next}, sequence.chunk(next), scratch.prefetches);
      }
      float* dq = s.partials + i * s.partial_floats;
      chunk_of_head<kDecay, kKeySplits>(p, at, sequence, scale, dstate(i), scratch, dq, dq + s.partial_floats / 2);
      if (i == 0) with_keys = thread;
    });
    for (std::int64_t i = 1; i < group; ++i) add_rows(s.partials + i * s.partial_floats, s.partial_floats, s.partials);
    store_keys(p, {p.shape, sequence, head, start}, s.scratch(p.shape, p.rule.decay, with_keys), s.partials,
               s.partials + s.partial_floats / 2);
  }
  for (std::int64_t i = 0; i < group; ++i) store_initial(p, n, head + i, scale, s.state_floats, dstate(i));
}

// The kernels of a rule: for a range of query heads, and for one query head with all threads.
template <class T>
struct Backward {
  void (*compute)(const DeltaBackward<T>& p, const HeadRange& range, std::byte* memory);
  void (*group)(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool);
};

template <class T, int kKeySplits, Decay kDecay>
constexpr Backward<T> kBackward = {BackwardRange<T, kKeySplits, kDecay>, BackwardGroup<T, kKeySplits, kDecay>};

template <class T, int kKeySplits>
Backward<T> backward_with(Decay decay) {
  if constexpr (kKeySplits > 1) {
    if (decay == Decay::channel) return kBackward<T, kKeySplits, Decay::channel>;
  }
  return decay == Decay::none ? kBackward<T, kKeySplits, Decay::none> : kBackward<T, kKeySplits, Decay::scalar>;
}

Backward<float> backward_of(const DeltaRule& rule, float) { return backward_with<float, 3>(rule.decay); }

// Keys are exact in one split if neither the norm nor a channel gate changes them.
Backward<bfloat16> backward_of(const DeltaRule& rule, bfloat16) {
  if (rule.qk_l2norm || rule.decay == Decay::channel) return backward_with<bfloat16, 2>(rule.decay);
  return backward_with<bfloat16, 1>(rule.decay);
}

}  // namespace

std::size_t AmxBwdBytes(const DeltaShape& shape, Decay decay, std::int64_t query_heads) {
  Arena arena;
  const HeadsScratch scratch(arena, shape, decay, query_heads);
  return arena.bytes();
}

std::size_t AmxBwdGroupBytes(const DeltaShape& shape, Decay decay, int threads) {
  Arena arena;
  const GroupScratch scratch(arena, shape, decay, threads);
  return arena.bytes();
}

template <class T>
void AmxBwdRange(const DeltaBackward<T>& p, const HeadRange& range, std::byte* memory) {
  backward_of(p.rule, T()).compute(p, range, memory);
}

template <class T>
void AmxBwdGroup(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool) {
  backward_of(p.rule, T()).group(p, n, i_q, memory, pool);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3 && !defined(EFLA_NO_AMX)

#if HWY_ONCE
namespace efla::cpu {

#if (HWY_TARGETS & HWY_AVX3) && !defined(EFLA_NO_AMX)
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule) {
  const double scale = std::abs(rule.scale_for(shape.key_dim));
  return amx_takes(shape) && scale > 1e-20 && scale < 1e20;
}

namespace {

// Returns whether the value heads of one query head at a time are distributed to all threads. They are if one query
// head per thread would take longer, because there are few query heads.
bool distributes_groups(const DeltaShape& shape, int threads) {
  const std::int64_t heads = shape.sequences() * shape.heads, rounds = (shape.group() + threads - 1) / threads;
  return heads < threads && heads * rounds < shape.group();
}

}  // namespace

std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  if (distributes_groups(shape, threads)) return N_AVX3::AmxBwdGroupBytes(shape, rule.decay, threads);
  return N_AVX3::AmxBwdBytes(shape, rule.decay, heads_per_block(query_heads_alone(shape), threads)) *
         static_cast<std::size_t>(threads);
}

template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  if (!distributes_groups(p.shape, pool.threads())) {
    return for_each_head_range(
        query_heads_alone(p.shape), 1, workspace, pool,
        [&](const HeadRange& range, std::byte* memory) { N_AVX3::AmxBwdRange(p, range, memory); });
  }
  for (std::int64_t i = 0; i < p.shape.sequences() * p.shape.heads; ++i) {
    N_AVX3::AmxBwdGroup(p, i / p.shape.heads, i % p.shape.heads, workspace.data, pool);
  }
}
#else
bool amx_takes_backward(const DeltaShape&, const DeltaRule&) { return false; }
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape&, const DeltaRule&, int) { return 0; }
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>&, Workspace, ThreadPool&) {}
#endif

template void amx_chunk_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void amx_chunk_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
