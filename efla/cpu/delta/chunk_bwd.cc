// The backward of the chunk algorithm (docs/equations.md), on vector units. Per chunk, with the forward's U, E (e_r =
// S_{r−1}ᵀ k_r), P, L and S recomputed from the state saved before the chunk, and dS the gradient with respect to the
// state after the chunk:
//
//   dU = scale Pᵀ dO + K dS,   (I + diag(a) L)ᵀ dR = dU,   G = −diag(a) dR
//   dV = diag(b) dR,   db = rowsum(V ∘ dR),   da = −rowsum(E ∘ dR)
//   dP = scale tril(dO Uᵀ),   dL = stril(G Uᵀ)
//   dQ = scale dO Sᵀ + dP K,   dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K
//   dS ← dS + scale Qᵀ dO + Kᵀ G
//
// and then through the gains a(β, λ), b(β, λ) with λ = ‖k‖², and through the L2 norm. With two keys the rows of G Sᵀ
// and of dL belong to κ (TwoKeyGradientTiles). With a decay, the Q and K that multiply S or dS are the rows q_read,
// k_read and k_write of chunk-inl.h, and gradients that come from these products are multiplied by the same decays. L
// and P contain the decays between their tokens. chunk_bwd_decay-inl.h computes the gradient of g.
//
// A task has some query heads of a sequence with all of their value heads, from the last chunk to the first
// (head_range.h). If no heads are computed together, a task has one query head, or all threads compute one query head
// (thread_group.h).
#include "efla/cpu/common/head_range.h"
#include "efla/cpu/common/prefetch_list.h"
#include "efla/cpu/common/thread_group.h"
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/chunk_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk_bwd_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {
namespace {

// Number of tasks into which a thread group divides a chunk's tokens to sum dq and dk over the value heads.
constexpr std::int64_t kFinishShares = 4;

// Scratch for some query heads with their value heads, used by one thread or by a thread group. A group computes all
// value heads of a chunk at once if there is at least one per thread. Otherwise the group computes the value heads one
// by one and distributes their panels.
struct HeadsScratch {
  int group_threads;
  bool heads_at_once;
  std::int64_t state_floats, partial_floats;
  std::int64_t scratches;  // value heads computed at a time
  std::size_t thread_bytes;
  float* dstate;  // per value head panels [K, kPanel] of dS
  // [2 kChunk, Kp] dq and dk of every value head, with two keys [3 kChunk, Kp] with dκ; one by one: their sum, and the
  // current head's
  float* partials;
  float* thread_scratch;

  HeadsScratch(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t query_heads, int group_threads)
      : group_threads(group_threads),
        heads_at_once(group_threads > 1 && shape.group() >= group_threads),
        state_floats(shape.key_dim * round_up(shape.value_dim, kPanel)),
        partial_floats((kTwoKeys ? 3 : 2) * kChunk * round_up(shape.key_dim, kPanel)),
        scratches(heads_at_once ? group_threads : 1) {
    Arena one;
    BwdScratch().lay_out(one, shape, decay, heads_at_once ? 1 : group_threads);
    thread_bytes = one.bytes();
    dstate = arena.floats(query_heads * shape.group() * state_floats);
    partials =
        arena.floats((heads_at_once ? shape.group() : std::min<std::int64_t>(shape.group(), 2)) * partial_floats);
    thread_scratch = arena.floats(scratches * static_cast<std::int64_t>(thread_bytes / sizeof(float)));
  }

  float* partial(std::int64_t head) const {
    return partials + (heads_at_once ? head : std::min<std::int64_t>(head, 1)) * partial_floats;
  }

  // Returns the scratch in which thread `thread` of the group computes value head `head`.
  BwdScratch scratch(const DeltaShape& shape, Decay decay, int thread, std::int64_t head) const {
    Arena arena(reinterpret_cast<std::byte*>(thread_scratch) + thread_bytes * static_cast<std::size_t>(thread));
    BwdScratch s;
    s.lay_out(arena, shape, decay, heads_at_once ? 1 : group_threads);
    s.dq = partial(head);
    s.dk = s.dq + partial_floats / (kTwoKeys ? 3 : 2);
    return s;
  }
};

std::size_t ChunkBwdBytes(const DeltaShape& shape, Decay decay, std::int64_t query_heads, int group_threads) {
  Arena arena;
  const HeadsScratch scratch(arena, shape, decay, query_heads, group_threads);
  return arena.bytes();
}

// Returns the number of active threads of a group; 0 if a group is not useful. A group that distributes panels is only
// useful if threads would otherwise have no head, because panels are small tasks.
std::int64_t ChunkBwdActiveThreads(const DeltaShape& shape, int group_threads) {
  if (shape.group() >= group_threads) return group_threads;
  if (shape.sequences() * shape.heads >= group_threads) return 0;
  return std::min<std::int64_t>(group_threads, round_up(shape.value_dim, kPanel) / kPanel);
}

// Plans prefetches of the rows that the chunk at `next` reads and writes, and of its saved state: part `share` of
// `shares` equal parts.
template <class T>
HWY_INLINE void plan_prefetches(const DeltaBackward<T>& p, const ChunkPlace& next, std::int64_t saved,
                                std::int64_t share, std::int64_t shares, PrefetchList& prefetches) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim, i_b = next.i_b;
  const std::int64_t first = next.tokens * share / shares, tokens = next.tokens * (share + 1) / shares - first;
  prefetches.clear();
  const std::int64_t begin = next.start + first;
  const auto add_rows_of = [&](const MicroSteps::Tokens& rows, const auto& view, std::int64_t head, std::int64_t count)
                               HWY_ATTR {
                                 if (view.stride[3] == 1)
                                   prefetches.add(view.at(i_b, rows.first, head), view.stride[1], rows.count(), count);
                               };
  const auto add = [&](const auto& view, std::int64_t head, std::int64_t count) HWY_ATTR {
    add_rows_of({begin, begin + tokens, 1, 0}, view, head, count);
  };
  const auto add_read = [&](const auto& view, std::int64_t head, std::int64_t count)
                            HWY_ATTR { add_rows_of(next.steps.read(begin, begin + tokens), view, head, count); };
  const auto add_decayed = [&](const auto& view, std::int64_t head, std::int64_t count)
                               HWY_ATTR { add_rows_of(next.steps.decayed(begin, begin + tokens), view, head, count); };
  const std::int64_t row = key_dim * share / shares, rows = key_dim * (share + 1) / shares - row;
  if (p.chunk_states.stride[4] == 1) {
    prefetches.add(p.chunk_states.at(i_b, saved, next.i_h, row), p.chunk_states.stride[3], rows, value_dim);
  }
  add(p.v, next.i_h, value_dim);
  add_read(p.dout, next.i_h, value_dim);
  add(p.dv, next.i_h, value_dim);
  if (p.rule.decay == Decay::channel) {
    add_decayed(p.g, next.i_h, key_dim);
    add_decayed(p.dg, next.i_h, key_dim);
  }
  // These stay in the cache for the other value heads of the same query head.
  add_read(p.q, next.i_q, key_dim);
  add(p.k, next.i_q, key_dim);
  add_read(p.dq, next.i_q, key_dim);
  add(p.dk, next.i_q, key_dim);
  if constexpr (kTwoKeys) {
    add(p.erase_key, next.i_q, key_dim);
    add(p.derase_key, next.i_q, key_dim);
  }
}

// Computes one panel of value columns of a chunk: U, G, dV, partial sums of da and db, dS, and the transposes for the
// products over keys.
HWY_NOINLINE void value_panel(const DeltaShape& shape, const ChunkPlace& at, std::int64_t first, float* dstates,
                              BwdScratch& s, float* errors, PrefetchList& prefetches) {
  const std::int64_t key_dim = shape.key_dim, padded_values = round_up(shape.value_dim, kPanel);
  const float* state = s.state + first * key_dim;
  float* dstate = dstates + first * key_dim;
  float* values = s.values + first * kChunk;
  const float* dout = s.dout + first * kChunk;
  float* u = s.u + first * kChunk;
  float* g = s.g + first * kChunk;

  for (std::int64_t i = 0; i < key_dim; i += kPanel) {
    const std::int64_t rows = std::min(kPanel, key_dim - i), column = i * padded_values + first * kPanel;
    transpose(state + i * kPanel, kPanel, rows, kPanel, s.state_t + column, kPanel);
    transpose(dstate + i * kPanel, kPanel, rows, kPanel, s.dstate_t + column, kPanel);
  }
  SubstitutionTiles<true> substitution{s.chunk, key_dim, state, values, u, errors, prefetches};
  for_tiles(at.tokens, substitution);
  const std::int64_t sums = first / kPanel * kChunk * kLanes;
  ReverseSubstitutionTiles<false> reverse{s.chunk, key_dim, at.tokens,   dstate,      errors,  values,
                                          dout,    g,       s.da + sums, s.db + sums, nullptr, &prefetches};
  for_tiles_reversed(at.tokens, reverse);
  if (s.chunk.decay.kind != Decay::none) {
    state_sums(state, dstate, key_dim, s.decay.state_sums + first / kPanel * key_dim * kLanes);
  }
  StateGradientTiles next{s.chunk, at.tokens, dout, g, dstate, prefetches};
  for_tiles(key_dim, next);
  for (std::int64_t column = 0; column < at.tokens; column += kPanel) {
    transpose(u + column * kPanel, kPanel, std::min(kPanel, at.tokens - column), kPanel,
              s.u_t + column * padded_values + first * kPanel, kPanel);
  }
}

// Computes dP (half 0), zero above the diagonal, or dL + dLᵀ (half 1), zero on the diagonal. With a scalar gate also
// computes decay.pairs, and multiplies both matrices by the weights. With a channel gate or two keys half 1 is dL
// alone.
HWY_NOINLINE void score_gradient(std::int64_t half, std::int64_t tokens, std::int64_t padded_values, BwdScratch& s) {
  const FloatTag d;
  const ChunkDecay& decay = s.chunk.decay;
  float* out = s.dscores + half * kChunk * kChunk;
  ScoreGradientTiles tiles{s, padded_values, half == 0 ? s.dout : s.g, out};
  for_tiles(tokens, tiles);
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = half == 0 ? r + 1 : r; j < tokens; ++j) out[r * kChunk + j] = 0.0F;
    if (decay.kind != Decay::scalar) continue;
    for (std::int64_t j = r * kChunk; j <= r * kChunk + r; j += kLanes) {
      const FloatVec gradient = hn::Load(d, out + j);
      const std::int64_t score = half * kChunk * kChunk + j;
      hn::Store(hn::Mul(gradient, hn::Load(d, s.chunk.scores + score)), d, s.decay.pairs + score);
      hn::Store(hn::Mul(gradient, hn::Load(d, decay.weights + j)), d, out + j);
    }
  }
  if (kTwoKeys || half == 0 || decay.kind == Decay::channel) return;
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = r + 1; j < tokens; ++j) out[r * kChunk + j] = out[j * kChunk + r];
  }
}

// Computes one key panel of dq, of the gradients of the keys and of the inputs of dg.
HWY_NOINLINE void key_panel(std::int64_t tokens, std::int64_t padded_values, std::int64_t key, BwdScratch& s,
                            PrefetchList& prefetches) {
  QueryGradientTiles query{s, padded_values, key, prefetches};
  for_tiles(tokens, query);
  std::conditional_t<kTwoKeys, TwoKeyGradientTiles, KeyGradientTiles> keys{s, padded_values, tokens, key, prefetches};
  for_tiles(tokens, keys);
  if (s.chunk.decay.kind == Decay::channel) channel_pairs({s.chunk, s.decay, s.dscores, s.dq, s.dk}, tokens, key);
}

// Computes dbeta, adds to the gradients of the keys the gradient through the gains, and computes dg.
template <class T>
HWY_INLINE void finish_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, BwdScratch& s) {
  const FloatTag d;
  const std::int64_t stride = s.chunk.key_stride;
  const GainSlopes slopes = gain_slopes(p.rule.step, at.tokens, s.chunk.beta, s.chunk.lambda);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    FloatVec da = hn::Zero(d);
    FloatVec db = hn::Zero(d);
    for (std::int64_t v = 0; v < p.shape.value_dim; v += kPanel) {
      const std::int64_t sums = (v / kPanel * kChunk + r) * kLanes;
      da = hn::Add(da, hn::Load(d, s.da + sums));
      db = hn::Add(db, hn::Load(d, s.db + sums));
    }
    finish_gains(p, at, r, hn::GetLane(hn::SumOfLanes(d, da)), hn::GetLane(hn::SumOfLanes(d, db)), s.chunk, slopes,
                 s.dk + r * stride);
  }
  if (s.chunk.decay.kind != Decay::none) finish_decay(p, at, s.chunk.decay, s.decay);
}

// Copies columns [first, last) of the saved state, of v and of scale · dO.
template <class T>
HWY_INLINE void load_columns(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                             std::int64_t last, BwdScratch& s) {
  const std::int64_t key_dim = p.shape.key_dim;
  load_state_panels(p.chunk_states, first, last, key_dim, s.state, at.i_b, saved, at.i_h);
  load_values(p.v, at, step_rows(at), first, last, 1.0F, s.values);
  if (at.steps.n > 1) std::fill_n(s.dout + first * kChunk, round_up(last - first, kPanel) * kChunk, 0.0F);
  load_values(p.dout, at, at.read(), first, last, static_cast<float>(p.rule.scale_for(key_dim)), s.dout);
}

// Computes one chunk of one value head, with its panels distributed to `group_threads` threads of the pool. Writes dq
// and dk, and replaces dstate, the gradient of the state after the chunk, by the gradient of the state before the
// chunk. Prefetches the chunk at `next`, unless this chunk would begin before the sequence.
template <class T>
HWY_INLINE void chunk_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, const ChunkPlace& next,
                              const Sequence& sequence, float* dstate, BwdScratch& s, int group_threads,
                              ThreadPool& pool) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel), panels = padded_values / kPanel;
  const std::int64_t saved = sequence.chunk(at.start);
  load_chunk(p, at, s.chunk);
  compute_scores(at, key_dim, s.chunk);
  PrefetchList prefetches(s.addresses);
  if (group_threads == 1) {
    load_columns(p, at, saved, 0, value_dim, s);
    if (next.start >= sequence.begin) plan_prefetches(p, next, sequence.chunk(next.start), 0, 1, prefetches);
  }
  pool.run(panels, [&](std::int64_t panel, int thread) HWY_ATTR {
    const std::int64_t first = panel * kPanel, last = std::min(first + kPanel, value_dim);
    if (group_threads == 1) return value_panel(p.shape, at, first, dstate, s, s.errors, prefetches);
    PrefetchList share(s.addresses + 2 * thread * BwdScratch::prefetch_addresses(p.shape));
    if (next.start >= sequence.begin) plan_prefetches(p, next, sequence.chunk(next.start), panel, panels, share);
    load_columns(p, at, saved, first, last, s);
    value_panel(p.shape, at, first, dstate, s, s.errors + thread * kChunk * kPanel, share);
    share.prefetch_all();
    store_values(s.values, at, step_rows(at), first, last, 1.0F, p.dv);
  });
  if (group_threads == 1) store_values(s.values, at, step_rows(at), 0, value_dim, 1.0F, p.dv);
  pool.run(2, [&](std::int64_t half, int) HWY_ATTR { score_gradient(half, at.tokens, padded_values, s); });
  if (p.rule.decay != Decay::none) {
    std::fill_n(s.decay.dg, kChunk * s.chunk.key_stride, 0.0F);
  }
  // If several threads compute the panels, only the first one issues prefetches.
  pool.run(s.chunk.key_stride / kPanel, [&](std::int64_t panel, int thread) HWY_ATTR {
    PrefetchList none;
    key_panel(at.tokens, padded_values, panel * kPanel, s, group_threads == 1 && thread == 0 ? prefetches : none);
  });
  if (group_threads == 1) prefetches.prefetch_all();
  finish_chunk(p, at, s);
}

// Computes the chunk at `start` of query head i_q: its value heads, whose dS are at dstate, then the sums dq and dk in
// the order of the heads. After the last value head it prefetches the chunk at next_start of value head `next_head`.
template <class T>
HWY_INLINE void chunk_of_group(const DeltaBackward<T>& p, const Sequence& sequence, std::int64_t i_q,
                               std::int64_t start, std::int64_t next_head, std::int64_t next_start, float* dstate,
                               const HeadsScratch& s, ThreadPool& pool) {
  const std::int64_t group = p.shape.group();
  const MicroSteps steps{steps_per_token(p)};
  int first_thread = 0;  // the thread that computed the first value head
  const auto compute = [&](std::int64_t i, int thread) HWY_ATTR {
    if (i == 0) first_thread = thread;
    BwdScratch scratch = s.scratch(p.shape, p.rule.decay, thread, i);
    const ChunkPlace at(p.shape, sequence, i_q * group + i, start, steps);
    ChunkPlace next(p.shape, sequence, next_head, next_start, steps);
    if (s.heads_at_once) {
      next = {p.shape, sequence, at.i_h, start - kChunk, steps};
    } else if (i + 1 < group) {
      next = {p.shape, sequence, at.i_h + 1, start, steps};
    }
    chunk_of_head(p, at, next, sequence, dstate + i * s.state_floats, scratch, s.heads_at_once ? 1 : s.group_threads,
                  pool);
  };
  if (s.heads_at_once) {
    pool.run(group, compute);
  } else {
    for (std::int64_t i = 0; i < group; ++i) {
      compute(i, 0);
      if (i > 0) add_rows(s.partial(i), s.partial_floats, s.partial(0));
    }
  }
  const ChunkPlace at(p.shape, sequence, i_q * group, start, steps);
  const BwdScratch sum = s.scratch(p.shape, p.rule.decay, first_thread, 0);
  const std::int64_t stride = sum.chunk.key_stride, shares = s.heads_at_once ? kFinishShares : 1;
  pool.run(shares, [&](std::int64_t share, int) HWY_ATTR {
    for (std::int64_t r = at.tokens * share / shares; r < at.tokens * (share + 1) / shares; ++r) {
      float *dq = sum.dq + r * stride, *dk = sum.dk + r * stride;
      for (std::int64_t i = 1; s.heads_at_once && i < group; ++i) {
        add_rows(s.partial(i) + r * stride, stride, dq);
        add_rows(s.partial(i) + s.partial_floats / (kTwoKeys ? 3 : 2) + r * stride, stride, dk);
        if constexpr (kTwoKeys) {
          add_rows(s.partial(i) + (2 * kChunk + r) * stride, stride, dk + kChunk * stride);
        }
      }
      finish_keys(p, at, r, sum.chunk, dq, dk);
    }
  });
}

// Computes query heads [range.head, range.head_end) of a sequence with all of their value heads, chunk by chunk and
// within a chunk head by head, with `group_threads` threads of the pool. Inside of a task group_threads is 1.
template <class T>
void ChunkBwdHeads(const DeltaBackward<T>& p, const HeadRange& range, std::byte* memory, int group_threads,
                   ThreadPool& pool) {
  Arena arena(memory);
  const HeadsScratch s(arena, p.shape, p.rule.decay, range.head_end - range.head, group_threads);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // padding beyond K and V must hold finite numbers
  const Sequence sequence = sequence_of(p, range.n);
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim, group = p.shape.group();
  const std::int64_t head = range.head * group, head_end = range.head_end * group;  // value heads
  const auto dstate = [&](std::int64_t i_h) { return s.dstate + (i_h - head) * s.state_floats; };
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    load_state_panels(p.dfinal_state, 0, value_dim, key_dim, dstate(i_h), range.n, i_h);
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t start = sequence.begin + (chunks - 1) * kChunk; start >= sequence.begin; start -= kChunk) {
    for (std::int64_t i_q = range.head; i_q < range.head_end; ++i_q) {
      const bool more_heads = i_q + 1 < range.head_end;
      chunk_of_group(p, sequence, i_q, start, more_heads ? (i_q + 1) * group : head,
                     more_heads ? start : start - kChunk, dstate(i_q * group), s, pool);
    }
  }
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    store_state_panels(dstate(i_h), p.dinitial_state, 0, value_dim, key_dim, range.n, i_h);
  }
}

void ChunkBwdHeadsFloat(const DeltaBackward<float>& p, const HeadRange& range, std::byte* memory, int group_threads,
                        ThreadPool& pool) {
  ChunkBwdHeads(p, range, memory, group_threads, pool);
}

void ChunkBwdHeadsBfloat16(const DeltaBackward<bfloat16>& p, const HeadRange& range, std::byte* memory,
                           int group_threads, ThreadPool& pool) {
  ChunkBwdHeads(p, range, memory, group_threads, pool);
}

}  // namespace
}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu::EFLA_KEYS {
namespace {

HWY_EXPORT(ChunkBwdHeadsFloat);
HWY_EXPORT(ChunkBwdHeadsBfloat16);
HWY_EXPORT(ChunkBwdBytes);
HWY_EXPORT(ChunkBwdActiveThreads);

void compute(const DeltaBackward<float>& p, const HeadRange& range, std::byte* memory, int group_threads,
             ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadsFloat)(p, range, memory, group_threads, pool);
}
void compute(const DeltaBackward<bfloat16>& p, const HeadRange& range, std::byte* memory, int group_threads,
             ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadsBfloat16)(p, range, memory, group_threads, pool);
}

std::size_t bytes(const DeltaShape& shape, const DeltaRule& rule, std::int64_t query_heads, int group_threads) {
  return HWY_DYNAMIC_DISPATCH(ChunkBwdBytes)(shape, rule.decay, query_heads, group_threads);
}

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  const std::int64_t together = heads_per_block(query_heads_alone(shape), threads);
  if (together > 1) return bytes(shape, rule, together, 1) * static_cast<std::size_t>(threads);
  return group_workspace_bytes(threads, [&](int group_threads) { return bytes(shape, rule, 1, group_threads); });
}

template <class T>
void chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  if (heads_per_block(query_heads_alone(p.shape), pool.threads()) > 1) {
    return for_each_head_range(query_heads_alone(p.shape), 1, workspace, pool,
                               [&](const HeadRange& range, std::byte* memory) { compute(p, range, memory, 1, pool); });
  }
  const std::int64_t active_threads = HWY_DYNAMIC_DISPATCH(ChunkBwdActiveThreads)(p.shape, pool.threads());
  for_each_head(p.shape.sequences() * p.shape.heads, active_threads, workspace, pool,
                [&](std::int64_t i, std::byte* memory, int group_threads) {
                  const std::int64_t head = i % p.shape.heads;
                  compute(p, {i / p.shape.heads, head, head + 1, 0, 1}, memory, group_threads, pool);
                });
}

template void chunk_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void chunk_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu::EFLA_KEYS
#endif  // HWY_ONCE
