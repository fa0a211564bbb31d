// The token recurrence (EFLA paper, equation 20).
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/recurrent.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

struct RecurrentScratch {
  ChunkScratch chunk;
  std::int64_t stride = 0;  // of a state's rows: V rounded up to whole vectors
  float* state = nullptr;   // [K, stride]
  float* v = nullptr;       // [kChunk, stride]
  float* u = nullptr;       // [kChunk, stride]
  float* row = nullptr;     // [stride]

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay) {
    chunk.lay_out(arena, shape, decay);
    stride = round_up(shape.value_dim, kLanes);
    state = arena.floats(shape.key_dim * stride);
    for (float** rows : {&v, &u}) *rows = arena.floats(kChunk * stride);
    row = arena.floats(stride);
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

// Value head i_h of sequence n.
template <class T>
void RecurrentFwdHead(const DeltaForward<T>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  Arena arena(memory);
  RecurrentScratch s;
  s.lay_out(arena, p.shape, p.rule.decay);
  const Sequence sequence = sequence_of(p, n);
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  load_state(p.initial_state, p.shape, s.stride, s.state, n, i_h);
  for (std::int64_t start = sequence.begin; start < sequence.end; start += kChunk) {
    const ChunkPlace at(p.shape, sequence, i_h, start);
    load_chunk(p, at, s.chunk);
    store_state(s.state, p.chunk_states, p.shape, s.stride, at.i_b, sequence.chunk(start), i_h);
    for (std::int64_t r = 0; r < at.tokens; ++r) {
      load_row(p.v.at(at.i_b, start + r, i_h), p.v.stride[3], p.shape.value_dim, s.stride, s.v + r * s.stride);
      advance(s, p.shape.key_dim, r, s.row);
      transposed_times(s.state, p.shape.key_dim, s.stride, s.chunk.q + r * s.chunk.key_stride, s.row);
      store_row(s.row, scale, p.shape.value_dim, p.o.at(at.i_b, start + r, i_h), p.o.stride[3]);
    }
  }
  store_state(s.state, p.final_state, p.shape, s.stride, n, i_h);
}

void RecurrentFwdFloat(const DeltaForward<float>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  RecurrentFwdHead(p, n, i_h, memory);
}

void RecurrentFwdBfloat16(const DeltaForward<bfloat16>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  RecurrentFwdHead(p, n, i_h, memory);
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(RecurrentFwdFloat);
HWY_EXPORT(RecurrentFwdBfloat16);
HWY_EXPORT(RecurrentBytesPerWorker);

void head(const DeltaForward<float>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdFloat)(p, n, i_h, memory);
}
void head(const DeltaForward<bfloat16>& p, std::int64_t n, std::int64_t i_h, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdBfloat16)(p, n, i_h, memory);
}

}  // namespace

std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(RecurrentBytesPerWorker)(shape, rule.decay) * static_cast<std::size_t>(threads);
}

template <class T>
void recurrent_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t heads = p.shape.value_heads;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(p.shape.sequences() * heads, [&](std::int64_t task, int worker) {
    head(p, task / heads, task % heads, workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

template void recurrent_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void recurrent_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
