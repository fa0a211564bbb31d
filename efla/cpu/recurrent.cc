// The gradients of the token recurrence (EFLA paper, equation 20).
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/recurrent.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Tokens whose states the backward keeps at a time: it walks a chunk in segments of these.
constexpr std::int64_t kSegment = 8;

struct RecurrentScratch {
  ChunkScratch chunk;
  std::int64_t stride = 0;   // of a state's rows: V rounded up to whole vectors
  float* state = nullptr;    // [K, stride]
  float* v = nullptr;        // [kChunk, stride]
  float* dout = nullptr;     // [kChunk, stride] scale · dO
  float* u = nullptr;        // [kChunk, stride]
  float* error = nullptr;    // [kChunk, stride] S_{t−1}ᵀ k_t
  float* row = nullptr;      // [stride]
  float* dstate = nullptr;   // for each value head of the query head [K, stride]
  float* segment = nullptr;  // [kSegment, K, stride] states before the tokens of a segment
  float* erased = nullptr;   // [Kp] S_{t−1} times the gradient with respect to the error
  float* dq = nullptr;       // [kChunk, Kp] summed over the value heads of the query head
  float* dk = nullptr;       // [kChunk, Kp] likewise

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay) {
    chunk.lay_out(arena, shape, decay);
    stride = round_up(shape.value_dim, kLanes);
    state = arena.floats(shape.key_dim * stride);
    for (float** rows : {&v, &u}) *rows = arena.floats(kChunk * stride);
    row = arena.floats(stride);
    for (float** rows : {&dout, &error}) *rows = arena.floats(kChunk * stride);
    dstate = arena.floats(shape.group() * shape.key_dim * stride);
    segment = arena.floats(kSegment * shape.key_dim * stride);
    erased = arena.floats(chunk.key_stride);
    for (float** rows : {&dq, &dk}) *rows = arena.floats(kChunk * chunk.key_stride);
  }
};

std::size_t RecurrentBytesPerWorker(const DeltaShape& shape, Decay decay) {
  Arena arena;
  RecurrentScratch().lay_out(arena, shape, decay);
  return arena.bytes();
}

// y = Sᵀ x.
HWY_INLINE void transposed_times(const float* HWY_RESTRICT state, std::int64_t rows, std::int64_t stride,
                                 const float* HWY_RESTRICT x, float* HWY_RESTRICT y) {
  const FloatTag d;
  for (std::int64_t j = 0; j < stride; j += kLanes) {
    FloatVec even = hn::Zero(d), odd = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
      even = hn::MulAdd(hn::Set(d, x[i]), hn::Load(d, state + i * stride + j), even);
      odd = hn::MulAdd(hn::Set(d, x[i + 1]), hn::Load(d, state + (i + 1) * stride + j), odd);
    }
    if (i < rows) even = hn::MulAdd(hn::Set(d, x[i]), hn::Load(d, state + i * stride + j), even);
    hn::Store(hn::Add(even, odd), d, y + j);
  }
}

// S += x yᵀ.
HWY_INLINE void add_outer(float* HWY_RESTRICT state, std::int64_t rows, std::int64_t stride,
                          const float* HWY_RESTRICT x, const float* HWY_RESTRICT y) {
  const FloatTag d;
  for (std::int64_t i = 0; i < rows; ++i) {
    const FloatVec factor = hn::Set(d, x[i]);
    for (std::int64_t j = 0; j < stride; j += kLanes) {
      float* s = state + i * stride + j;
      hn::Store(hn::MulAdd(factor, hn::Load(d, y + j), hn::Load(d, s)), d, s);
    }
  }
}

// Row i of S times factors[i].
HWY_INLINE void scale_rows(float* HWY_RESTRICT state, std::int64_t rows, std::int64_t stride,
                           const float* HWY_RESTRICT factors) {
  const FloatTag d;
  for (std::int64_t i = 0; i < rows; ++i) {
    const FloatVec factor = hn::Set(d, factors[i]);
    for (std::int64_t j = 0; j < stride; j += kLanes) {
      float* s = state + i * stride + j;
      hn::Store(hn::Mul(factor, hn::Load(d, s)), d, s);
    }
  }
}

// x[i] += Σ_j S[i, j] y[j].
HWY_INLINE void add_times(const float* HWY_RESTRICT state, std::int64_t rows, std::int64_t stride,
                          const float* HWY_RESTRICT y, float* HWY_RESTRICT x) {
  for (std::int64_t i = 0; i < rows; ++i) x[i] += dot(state + i * stride, y, stride);
}

// S ← D S, u = b v − a Sᵀk and S ← S + k uᵀ for row r of the chunk; keeps Sᵀk in `error`.
HWY_INLINE void advance(RecurrentScratch& s, std::int64_t key_dim, std::int64_t r, float* error) {
  const FloatTag d;
  const float* k = s.chunk.k + r * s.chunk.key_stride;
  float* u = s.u + r * s.stride;
  const ChunkDecay& decay = s.chunk.decay;
  if (decay.kind != Decay::none) scale_rows(s.state, key_dim, s.stride, decay.token + r * decay.key_stride);
  transposed_times(s.state, key_dim, s.stride, k, error);
  const FloatVec a = hn::Set(d, s.chunk.erase[r]);
  const FloatVec b = hn::Set(d, s.chunk.write[r]);
  for (std::int64_t j = 0; j < s.stride; j += kLanes) {
    const FloatVec written = hn::Mul(b, hn::Load(d, s.v + r * s.stride + j));
    hn::Store(hn::NegMulAdd(a, hn::Load(d, error + j), written), d, u + j);
  }
  add_outer(s.state, key_dim, s.stride, k, u);
}

template <class View4, class... Index>
HWY_INLINE void load_state(const View4& view, const DeltaShape& shape, std::int64_t stride, float* state,
                           Index... index) {
  for (std::int64_t i = 0; i < shape.key_dim; ++i) {
    if (view) {
      load_row(view.at(index..., i), view.stride.back(), shape.value_dim, stride, state + i * stride);
    } else {
      std::fill_n(state + i * stride, stride, 0.0F);
    }
  }
}

template <class View4, class... Index>
HWY_INLINE void store_state(const float* state, const View4& view, const DeltaShape& shape, std::int64_t stride,
                            Index... index) {
  if (!view) return;
  for (std::int64_t i = 0; i < shape.key_dim; ++i) {
    store_row(state + i * stride, 1.0F, shape.value_dim, view.at(index..., i), view.stride.back());
  }
}

// The gradient through S̃_t = D_t S_{t−1} of token r: dg, and dstate from that of S̃_t to that of S_{t−1}.
template <class T>
HWY_INLINE void decay_bwd(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t r, const float* before,
                          float* dstate, RecurrentScratch& s) {
  const ChunkDecay& decay = s.chunk.decay;
  const float* factors = decay.token + r * decay.key_stride;
  float sum = 0.0F;
  for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
    const float dg = factors[i] * dot(dstate + i * s.stride, before + i * s.stride, s.stride);
    if (decay.kind == Decay::channel) p.dg(at.i_b, at.start + r, at.i_h, i) = dg;
    sum += dg;
  }
  if (decay.kind == Decay::scalar) p.dg(at.i_b, at.start + r, at.i_h, 0) = sum;
  scale_rows(dstate, p.shape.key_dim, s.stride, factors);
}

// The gradient of token r of a chunk; `after` is S_t, `before` S_{t−1}, dstate the gradient with respect to S_t and
// then to S_{t−1}. Adds to row r of dq and dk.
template <class T>
HWY_INLINE void token_bwd(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t r, const float* after,
                          const float* before, float* dstate, RecurrentScratch& s) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const std::int64_t key_dim = p.shape.key_dim, row = r * c.key_stride;
  const float* k = c.k + row;
  const float* dout = s.dout + r * s.stride;
  float* dk = s.dk + row;
  add_times(after, key_dim, s.stride, dout, s.dq + row);
  add_outer(dstate, key_dim, s.stride, c.q + row, dout);
  add_times(dstate, key_dim, s.stride, s.u + r * s.stride, dk);  // S_t = S̃_t + k uᵀ
  transposed_times(dstate, key_dim, s.stride, k, s.row);         // du
  const float da = -dot(s.error + r * s.stride, s.row, s.stride);
  const float db = dot(s.v + r * s.stride, s.row, s.stride);
  store_row(s.row, c.write[r], p.shape.value_dim, p.dv.at(at.i_b, at.start + r, at.i_h), p.dv.stride[3]);
  for (std::int64_t j = 0; j < s.stride; j += kLanes) {  // the gradient with respect to S̃_tᵀ k
    hn::Store(hn::Mul(hn::Set(d, -c.erase[r]), hn::Load(d, s.row + j)), d, s.row + j);
  }
  std::fill_n(s.erased, c.key_stride, 0.0F);
  add_times(before, key_dim, s.stride, s.row, s.erased);
  const bool decays = c.decay.kind != Decay::none;
  for (std::int64_t i = 0; i < key_dim; ++i) dk[i] += decays ? c.decay.token[row + i] * s.erased[i] : s.erased[i];
  add_outer(dstate, key_dim, s.stride, k, s.row);
  if (decays) decay_bwd(p, at, r, before, dstate, s);
  finish_gains(p, at, r, da, db, c, dk);
}

// One chunk of one value head, in segments from the last; dstate goes from the state after the chunk to the one before.
template <class T>
HWY_INLINE void chunk_of_head_bwd(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, float* dstate,
                                  RecurrentScratch& s) {
  const std::int64_t key_dim = p.shape.key_dim, size = key_dim * s.stride;
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  load_chunk(p, at, s.chunk);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    load_row(p.v.at(at.i_b, at.start + r, at.i_h), p.v.stride[3], p.shape.value_dim, s.stride, s.v + r * s.stride);
    float* dout = s.dout + r * s.stride;
    load_row(p.dout.at(at.i_b, at.start + r, at.i_h), p.dout.stride[3], p.shape.value_dim, s.stride, dout);
    for (std::int64_t j = 0; j < s.stride; ++j) dout[j] *= scale;
  }
  for (std::int64_t first = (at.tokens - 1) / kSegment * kSegment; first >= 0; first -= kSegment) {
    const std::int64_t last = std::min(first + kSegment, at.tokens);
    load_state(p.chunk_states, p.shape, s.stride, s.state, at.i_b, saved, at.i_h);
    for (std::int64_t r = 0; r < last; ++r) {
      if (r >= first) std::copy_n(s.state, size, s.segment + (r - first) * size);
      advance(s, key_dim, r, s.error + r * s.stride);
    }
    for (std::int64_t r = last - 1; r >= first; --r) {
      const float* after = r + 1 == last ? s.state : s.segment + (r + 1 - first) * size;
      token_bwd(p, at, r, after, s.segment + (r - first) * size, dstate, s);
    }
  }
}

// Query head i_q of sequence n with all of its value heads.
template <class T>
void RecurrentBwdHead(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory) {
  Arena arena(memory);
  RecurrentScratch s;
  s.lay_out(arena, p.shape, p.rule.decay);
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t group = p.shape.group(), size = p.shape.key_dim * s.stride;
  for (std::int64_t i = 0; i < group; ++i) {
    load_state(p.dfinal_state, p.shape, s.stride, s.dstate + i * size, n, i_q * group + i);
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::int64_t start = sequence.begin + chunk * kChunk;
    const std::int64_t count = kChunk * s.chunk.key_stride;
    std::fill_n(s.dq, count, 0.0F);
    std::fill_n(s.dk, count, 0.0F);
    for (std::int64_t i = 0; i < group; ++i) {
      const ChunkPlace at(p.shape, sequence, i_q * group + i, start);
      chunk_of_head_bwd(p, at, sequence.chunk(start), s.dstate + i * size, s);
    }
    const ChunkPlace at(p.shape, sequence, i_q * group, start);
    for (std::int64_t r = 0; r < at.tokens; ++r) {
      finish_keys(p, at, r, s.chunk, s.dq + r * s.chunk.key_stride, s.dk + r * s.chunk.key_stride);
    }
  }
  for (std::int64_t i = 0; i < group; ++i) {
    store_state(s.dstate + i * size, p.dinitial_state, p.shape, s.stride, n, i_q * group + i);
  }
}

}  // namespace

void RecurrentBwdFloat(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  RecurrentBwdHead(p, n, i_h, memory);
}

void RecurrentBwdBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  RecurrentBwdHead(p, n, i_h, memory);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(RecurrentBwdFloat);
HWY_EXPORT(RecurrentBwdBfloat16);
HWY_EXPORT(RecurrentBytesPerWorker);

void head(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdFloat)(p, n, i_q, memory);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdBfloat16)(p, n, i_q, memory);
}

}  // namespace

std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(RecurrentBytesPerWorker)(shape, rule.decay) * static_cast<std::size_t>(threads);
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(p.shape.sequences() * p.shape.heads, [&](std::int64_t task, int worker) {
    head(p, task / p.shape.heads, task % p.shape.heads, workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

template void recurrent_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void recurrent_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
