// The short convolution, forward and backward. docs/ops/short_conv.md has the equations. A thread computes kVector
// channels of a strip of consecutive tokens of one batch entry, and keeps the last kTaps tokens in registers. Tap i
// here multiplies the token i places before the current one. Only taps i ≤ age are used, where age is the number of
// tokens of the sequence before the current one, so that packed sequences do not mix. In the backward a thread block
// adds its part of dweight, and a second kernel adds the parts (partial_sums.h).
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/activation.cuh"
#include "efla/cuda/layers/short_conv.h"

namespace efla::gpu {
namespace {

constexpr int kGroups = 32;  // groups of kVector channels per thread block
constexpr int kStrips = 8;   // strips per thread block
constexpr int kThreads = kGroups * kStrips;
constexpr int kPiece = 4;  // channels per thread if tokens can be read in pieces

constexpr int kLong = 64, kShort = 16;  // tokens per strip (kFewConvBlocks)

// Whether registers suffice for several thread blocks per multiprocessor.
template <class T, int kTaps>
constexpr bool kSmall = sizeof(T) < sizeof(float) && kTaps < kMaxConvWidth;
static_assert(kLong % kMaxConvWidth == 0 && kShort % kMaxConvWidth == 0);

// Where a thread works.
struct Place {
  std::int64_t i_b, first_token, end_token, first_channel;
};

// Returns the place of this thread; a thread without work gets no tokens. A thread block has 32 groups of channels and
// eight strips. Consecutive thread blocks have the next channels of the same strips, then the next strips. A batch
// entry has `strips` strips, and strips are numbered over all batch entries.
template <int kVector, int kStrip>
__device__ Place place_of(const std::array<std::int64_t, 3>& extent, std::int64_t channel_blocks, std::int64_t strips) {
  const std::int64_t block = blockIdx.x, i_c = block % channel_blocks;
  const std::int64_t strip = block / channel_blocks * kStrips + threadIdx.x / kGroups;
  const std::int64_t i_b = strip / strips, first = strip % strips * kStrip;
  return {i_b, first, i_b < extent[0] ? min(first + kStrip, extent[1]) : first,
          (i_c * kGroups + threadIdx.x % kGroups) * kVector};
}

// Walks over the sequences of a batch entry, token by token. Counts are int, because 64-bit arithmetic per token is
// slow.
template <bool kPacked>
struct Sequences {
  const View<const std::int64_t, 1>& ends;
  std::int64_t begin = 0, n = 0;  // of the first token's sequence
  int age = 0;                    // tokens of the sequence before the current one, at most kEnough
  int left = kEnough;             // tokens of the sequence from the current one on, at most kEnough

  static constexpr int kEnough = 1 << 20;  // more than kTaps and than a strip

  __device__ Sequences(const View<const std::int64_t, 1>& cu_seqlens, std::int64_t first) : ends(cu_seqlens) {
    if constexpr (kPacked) {
      std::int64_t least = 0, most = ends.extent[0] - 1;  // the first end after the token is in (least, most]
      while (most - least > 1) {
        const std::int64_t middle = (least + most) / 2;
        (ends(middle) <= first ? least : most) = middle;
      }
      n = most;
      begin = ends(n - 1);
      left = clamped(ends(n) - first);
    }
    age = clamped(first - begin);
  }
  // Moves on to the next token.
  __device__ void advance() {
    ++age;
    if constexpr (kPacked) {
      if (--left > 0) return;
      while (left == 0 && n + 1 < ends.extent[0]) {
        left = clamped(ends(n + 1) - ends(n));
        ++n;
      }
      age = 0;
    }
  }

 private:
  __device__ static int clamped(std::int64_t count) { return static_cast<int>(min(count, std::int64_t{kEnough})); }
};

// The taps of a thread's channels, the current token's tap first; zeros beyond the width.
template <int kVector, int kTaps>
struct Taps {
  float at[kTaps][kVector];

  __device__ Taps(const View<const float, 2>& weight, std::int64_t first_channel) {
    const std::int64_t width = weight.extent[1];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) at[i][c] = i < width ? weight(first_channel + c, width - 1 - i) : 0.0F;
    }
  }
};

// The last tokens, the newest first.
template <int kVector, int kTaps>
struct History {
  float at[kTaps][kVector];

  // Moves every token one place on, so that at[0] is free.
  __device__ void shift() {
#pragma unroll
    for (int i = kTaps - 1; i > 0; --i) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) at[i][c] = at[i - 1][c];
    }
  }
  // Reads the tokens before token t, token t − 1 into at[0], as far as the sequence and the taps of token t reach.
  template <class T>
  __device__ void load_before(const View<const T, 3>& x, const Place& place, std::int64_t t, std::int64_t begin) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      if (i + 1 < kTaps && t - 1 - i >= begin) {
        load_piece(x.at(place.i_b, t - 1 - i, place.first_channel), at[i]);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) at[i][c] = 0;
      }
    }
  }
};

// Computes a = Σ_i taps[i] x[t − i] over the first `reach` taps.
template <int kVector, int kTaps>
__device__ void weighted_sum(const Taps<kVector, kTaps>& taps, const History<kVector, kTaps>& x, int reach,
                             float (&a)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) a[c] = 0;
#pragma unroll
  for (int i = kTaps - 1; i >= 0; --i) {
    if (i >= reach) continue;
#pragma unroll
    for (int c = 0; c < kVector; ++c) a[c] += taps.at[i][c] * x.at[i][c];
  }
}

// Calls step(t, t % kTaps) for every t < tokens. The second argument is a constant after unrolling.
template <int kTaps, class Step>
__device__ __forceinline__ void for_tokens(int tokens, Step&& step) {
  for (int first = 0; first < tokens; first += kTaps) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      if (first + i < tokens) step(first + i, i);
    }
  }
}

template <bool kPacked, class T, int kVector, int kTaps, int kStrip>
__global__ void __launch_bounds__(kThreads, kSmall<T, kTaps> ? 3 : 1)
    forward_kernel(const __grid_constant__ ShortConvForward<T> p, std::int64_t channel_blocks, std::int64_t strips) {
  const Place place = place_of<kVector, kStrip>(p.x.extent, channel_blocks, strips);
  if (place.first_token >= place.end_token || place.first_channel >= p.x.extent[2]) return;
  const Taps<kVector, kTaps> taps(p.weight, place.first_channel);
  Sequences<kPacked> sequences(p.cu_seqlens, place.first_token);
  History<kVector, kTaps> x;
  x.load_before(p.x, place, place.first_token, sequences.begin);
  const int tokens = static_cast<int>(place.end_token - place.first_token),
            width = static_cast<int>(p.weight.extent[1]);
  const T* from = p.x.at(place.i_b, place.first_token, place.first_channel);
  T* to = p.y.at(place.i_b, place.first_token, place.first_channel);
  Piece<T, kVector> ahead[kTaps];  // tokens that are read while earlier tokens are computed
  const auto read = [&](int t, int i) {
    if (t < tokens) ahead[i] = read_piece<kVector>(from);
    from += p.x.stride[1];
  };
  const auto compute = [&](int t, int i, int reach) {
    x.shift();
    widen(ahead[i], x.at[0]);
    read(t + kTaps, i);
    float y[kVector];
    weighted_sum(taps, x, reach, y);
#pragma unroll
    for (int c = 0; c < kVector; ++c) y[c] *= sigmoid<T>(y[c]);
    store_piece(to, y);
    to += p.y.stride[1];
  };
#pragma unroll
  for (int i = 0; i < kTaps; ++i) read(i, i);
  if (tokens == kStrip && width == kTaps && sequences.left >= tokens) {
    for_tokens<kTaps>(kStrip, [&](int t, int i) { compute(t, i, kTaps); });
  } else {
    for_tokens<kTaps>(tokens, [&](int t, int i) {
      compute(t, i, min(width, sequences.age + 1));
      sequences.advance();
    });
  }
}

// Adds what a token's dy gives to dx of the first `reach` tokens of the history and, if `own` is set, to dweight.
// Overwrites dy.
template <class T, int kVector, int kTaps>
__device__ __forceinline__ void add_gradients(const Taps<kVector, kTaps>& taps, const History<kVector, kTaps>& x,
                                              float (&dy)[kVector], int reach, bool own, History<kVector, kTaps>& dx,
                                              float (&dweight)[kTaps][kVector]) {
  float a[kVector];
  weighted_sum(taps, x, reach, a);
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    const float sigma = sigmoid<T>(a[c]);
    dy[c] *= sigma * (1 + a[c] * (1 - sigma));
  }
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j >= reach) continue;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      dx.at[j][c] += taps.at[j][c] * dy[c];
      if (own) dweight[j][c] += dy[c] * x.at[j][c];
    }
  }
}

// Writes the sums of dweight over the block's strips to `part`, [D][W], through `sums` in shared memory. Each thread
// has its strip's dweight, the current token's tap first.
template <int kVector, int kTaps>
__device__ __forceinline__ void write_part(const float (&dweight)[kTaps][kVector],
                                           float (&sums)[kStrips][kVector * kTaps][kGroups], float* part,
                                           std::int64_t first_channel, std::int64_t channels, int width) {
  const int group = threadIdx.x % kGroups, strip = threadIdx.x / kGroups;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sums[strip][i * kVector + c][group] = dweight[i][c];
  }
  __syncthreads();
  for (int own = threadIdx.x; own < kGroups * kVector * kTaps; own += kThreads) {
    const int from = own % kGroups, i = own / kGroups / kVector, c = own / kGroups % kVector;
    const std::int64_t channel = first_channel - group * kVector + from * kVector + c;
    if (channel >= channels || i >= width) continue;
    float sum = 0;
    for (int s = 0; s < kStrips; ++s) sum += sums[s][i * kVector + c][from];
    part[channel * width + width - 1 - i] = sum;
  }
}

// Computes dx and the parts of dweight, [⌈strips of all batch entries / kStrips⌉][D][W]. dx[s] is complete kTaps − 1
// tokens after s, so a strip continues for kTaps − 1 tokens after its end.
template <bool kPacked, class T, int kVector, int kTaps, int kStrip>
__global__ void __launch_bounds__(kThreads, kSmall<T, kTaps> ? 2 : 1)
    backward_kernel(const __grid_constant__ ShortConvBackward<T> p, float* parts, std::int64_t channel_blocks,
                    std::int64_t strips) {
  __shared__ float sums[kStrips][kVector * kTaps][kGroups];
  const Place place = place_of<kVector, kStrip>(p.x.extent, channel_blocks, strips);
  const std::int64_t channels = p.x.extent[2];
  const int width = static_cast<int>(p.weight.extent[1]);
  float dweight[kTaps][kVector] = {};
  if (place.first_token < place.end_token && place.first_channel < channels) {
    const Taps<kVector, kTaps> taps(p.weight, place.first_channel);
    Sequences<kPacked> sequences(p.cu_seqlens, place.first_token);
    History<kVector, kTaps> x, dx;
    x.load_before(p.x, place, place.first_token, sequences.begin);
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) dx.at[i][c] = 0;
    }
    const T* from_x = p.x.at(place.i_b, place.first_token, place.first_channel);
    const T* from_dy = p.dy.at(place.i_b, place.first_token, place.first_channel);
    T* to = p.dx.at(place.i_b, place.first_token, place.first_channel) - (kTaps - 1) * p.dx.stride[1];
    const int tokens = static_cast<int>(place.end_token - place.first_token), end = tokens + kTaps - 1;
    const int readable = static_cast<int>(min(p.x.extent[1] - place.first_token, std::int64_t{end}));
    Piece<T, kVector> ahead_x[kTaps], ahead_dy[kTaps];  // tokens that are read while earlier tokens are computed
    const auto read = [&](int t, int i) {
      if (t < readable) {
        ahead_x[i] = read_piece<kVector>(from_x);
        ahead_dy[i] = read_piece<kVector>(from_dy);
      }
      from_x += p.x.stride[1];
      from_dy += p.dy.stride[1];
    };
    const auto shift = [&] {
      x.shift();
      dx.shift();
#pragma unroll
      for (int c = 0; c < kVector; ++c) dx.at[0][c] = 0;
    };
    const auto compute = [&](int t, int i, int reach, bool own) {
      float dy[kVector];
      widen(ahead_x[i], x.at[0]);
      widen(ahead_dy[i], dy);
      read(t + kTaps, i);
      add_gradients<T>(taps, x, dy, reach, own, dx, dweight);
    };
    // Stores the gradient of the token kTaps − 1 places before, if it is in this strip.
    const auto store = [&](bool own) {
      if (own) store_piece(to, dx.at[kTaps - 1]);
      to += p.dx.stride[1];
    };
#pragma unroll
    for (int i = 0; i < kTaps; ++i) read(i, i);
    if (tokens == kStrip && width == kTaps && sequences.left >= tokens) {
      for_tokens<kTaps>(kStrip, [&](int t, int i) {
        shift();
        compute(t, i, kTaps, true);
        store(t >= kTaps - 1);
      });
#pragma unroll
      for (int i = 0; i < kTaps - 1; ++i) {
        shift();
        if (kStrip + i < min(readable, sequences.left)) compute(kStrip + i, i, kTaps, false);
        store(true);
      }
    } else {
      for_tokens<kTaps>(end, [&](int t, int i) {
        shift();
        if (t < readable) {
          compute(t, i, min(width, sequences.age + 1), t < tokens);
          sequences.advance();
        }
        store(t >= kTaps - 1);
      });
    }
  }
  write_part(dweight, sums, parts + blockIdx.x / channel_blocks * channels * width, place.first_channel, channels,
             width);
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The strips of a problem x [B, T, D]: tokens per strip, strips per batch entry, and thread blocks per group of
// channels.
struct Strips {
  int length;
  std::int64_t per_entry, blocks;
};

Strips strips_of(const std::array<std::int64_t, 3>& extent, std::int64_t channel_blocks) {
  const auto of = [&](int length) {
    const std::int64_t per_entry = ceil_div(extent[1], length);
    return Strips{length, per_entry, ceil_div(per_entry * extent[0], kStrips)};
  };
  const Strips strips = of(kLong);
  return strips.blocks * channel_blocks < kFewConvBlocks ? of(kShort) : strips;
}

// How a problem is divided.
struct Division {
  bool pieces;
  std::int64_t channel_blocks;
  Strips strips;

  Division(bool aligned, const std::array<std::int64_t, 3>& extent, std::int64_t width)
      : pieces(aligned && width <= 4),
        channel_blocks(ceil_div(extent[2], kGroups * (pieces ? kPiece : 1))),
        strips(strips_of(extent, channel_blocks)) {}
};

template <class T>
Division division_of(const ShortConvForward<T>& p) {
  return {has_aligned_rows(p.x) && has_aligned_rows(p.y), p.x.extent, p.weight.extent[1]};
}

template <class T>
Division division_of(const ShortConvBackward<T>& p) {
  return {has_aligned_rows(p.x) && has_aligned_rows(p.dy) && has_aligned_rows(p.dx), p.x.extent, p.weight.extent[1]};
}

// Calls f<kVector, kTaps, kStrip>() with the values for a problem.
template <class F>
void with_shape(const Division& division, F&& f) {
  const auto with_strip = [&]<int kVector, int kTaps> {
    if (division.strips.length == kShort) return f.template operator()<kVector, kTaps, kShort>();
    f.template operator()<kVector, kTaps, kLong>();
  };
  if (division.pieces) return with_strip.template operator()<kPiece, 4>();
  with_strip.template operator()<1, kMaxConvWidth>();
}

}  // namespace

template <class T>
void short_conv(const ShortConvForward<T>& p, cudaStream_t stream) {
  if (p.x.size() == 0) return;
  const Division division = division_of(p);
  const unsigned grid = grid_of("short_conv_forward", division.channel_blocks * division.strips.blocks);
  with_shape(division, [&]<int kVector, int kTaps, int kStrip> {
    const auto kernel = p.cu_seqlens ? forward_kernel<true, T, kVector, kTaps, kStrip>
                                     : forward_kernel<false, T, kVector, kTaps, kStrip>;
    kernel<<<grid, kThreads, 0, stream>>>(p, division.channel_blocks, division.strips.per_entry);
    check_launch("short_conv_forward");
  });
}

template <class T>
void short_conv(const ShortConvBackward<T>& p, const Workspace& workspace, cudaStream_t stream) {
  require_workspace("short_conv_backward", workspace, short_conv_workspace_bytes(p));
  auto* parts = static_cast<float*>(workspace.data);
  const Division division = division_of(p);
  if (p.x.size() > 0) {
    const unsigned grid = grid_of("short_conv_backward", division.channel_blocks * division.strips.blocks);
    with_shape(division, [&]<int kVector, int kTaps, int kStrip> {
      const auto kernel = p.cu_seqlens ? backward_kernel<true, T, kVector, kTaps, kStrip>
                                       : backward_kernel<false, T, kVector, kTaps, kStrip>;
      kernel<<<grid, kThreads, 0, stream>>>(p, parts, division.channel_blocks, division.strips.per_entry);
      check_launch("short_conv_backward");
    });
  }
  launch_add_parts(parts, p.x.size() > 0 ? division.strips.blocks : 0, p.dweight, stream);
}

template <class T>
std::size_t short_conv_workspace_bytes(const ShortConvBackward<T>& p) {
  return static_cast<std::size_t>(division_of(p).strips.blocks * p.weight.extent[0] * p.weight.extent[1]) *
         sizeof(float);
}

#define EFLA_INSTANTIATE(T)                                                              \
  template void short_conv(const ShortConvForward<T>&, cudaStream_t);                    \
  template void short_conv(const ShortConvBackward<T>&, const Workspace&, cudaStream_t); \
  template std::size_t short_conv_workspace_bytes(const ShortConvBackward<T>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
