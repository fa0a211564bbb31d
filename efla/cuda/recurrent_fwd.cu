// The token recurrence of rule/problem.h in float32, one thread block per sequence, value head and slice of the value
// columns. The state stays in registers: a thread owns kColumns columns and every kParts-th group of four keys.
#include "efla/cuda/delta.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"

namespace efla::gpu {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kParts = 8;                                // threads that share a column
constexpr int kColumns = 2;                              // columns per thread
constexpr int kSlice = kWarps * 32 / kParts * kColumns;  // columns per thread block
constexpr int kStage = 16;                               // tokens staged in shared memory together

// What the tokens of a stage bring, widened to float32, after the L2 norm; keys beyond K are zeros.
template <int KD, bool kChannel>
struct Stage {
  float q[kStage][KD], k[kStage][KD];
  float decay[kStage][kChannel ? KD : 1];
  float v[kStage][kSlice];
  float a[kStage], b[kStage];
};

__device__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Reads row [K] of a token, one lane per 32nd element, and returns the sum of its squares.
template <int KD, class T>
__device__ float read_row(const View<const T, 4>& view, std::int64_t i_b, std::int64_t t, std::int64_t i_h, int lane,
                          float (&row)[KD / 32]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int at = lane + 32 * i;
    row[i] = at < view.extent[3] ? to_float(view(i_b, t, i_h, at)) : 0.0F;
    sum += row[i] * row[i];
  }
  return warp_sum(sum);
}

// Fills row r of the stage from token t; run by one warp.
template <int KD, bool kChannel, class T>
__device__ void stage_token(const DeltaForward<T>& p, const Sequence& at, std::int64_t t, std::int64_t i_h,
                            std::int64_t first, int r, int lane, Stage<KD, kChannel>& stage) {
  const std::int64_t i_q = i_h / p.shape.group();
  const auto epsilon = static_cast<float>(kL2NormEpsilon);
  float q[KD / 32], k[KD / 32];
  const float q_squares = read_row<KD>(p.q, at.i_b, t, i_q, lane, q);
  float lambda = read_row<KD>(p.k, at.i_b, t, i_q, lane, k);
  float q_factor = 1, k_factor = 1;
  if (p.rule.qk_l2norm) {
    q_factor = 1 / sqrtf(q_squares + epsilon);
    k_factor = 1 / sqrtf(lambda + epsilon);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < KD / 32; ++i) squares += (k[i] * k_factor) * (k[i] * k_factor);
    lambda = warp_sum(squares);
  }
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    stage.q[r][lane + 32 * i] = q[i] * q_factor;
    stage.k[r][lane + 32 * i] = k[i] * k_factor;
    if constexpr (kChannel) {
      const int channel = lane + 32 * i;
      stage.decay[r][channel] = channel < p.shape.key_dim ? expf(p.g(at.i_b, t, i_h, channel)) : 1.0F;
    }
  }
  for (int j = lane; j < kSlice; j += 32) {
    stage.v[r][j] = first + j < p.shape.value_dim ? to_float(p.v(at.i_b, t, i_h, first + j)) : 0.0F;
  }
  if (lane == 0) {
    const float alpha = gain_alpha(p.rule.step, to_float(p.beta(at.i_b, t, i_h)), lambda);
    stage.a[r] = static_cast<float>(p.rule.step.erase_scale) * alpha;
    stage.b[r] = static_cast<float>(p.rule.step.write_scale) * alpha;
    if constexpr (!kChannel) stage.decay[r][0] = p.g ? expf(p.g(at.i_b, t, i_h, 0)) : 1.0F;
  }
}

// The columns of a state that a thread owns: key 4·kParts·i + 4·part + c of column j is s[j][4·i + c].
template <int KD>
struct Columns {
  static constexpr int kKeys = KD / kParts;
  float s[kColumns][kKeys];
  int part;
  std::int64_t column;

  template <class F>
  __device__ void for_each(std::int64_t key_dim, std::int64_t value_dim, F&& f) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = i / 4 * 4 * kParts + 4 * part + i % 4;
        if (key < key_dim && column + j < value_dim) f(s[j][i], key, column + j);
      }
    }
  }
};

template <int KD, bool kChannel, class T>
__global__ void __launch_bounds__(kThreads)
    recurrent_fwd_kernel(const __grid_constant__ DeltaForward<T> p, int slices, float scale) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& stage = *reinterpret_cast<Stage<KD, kChannel>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x % slices) * kSlice;
  const std::int64_t i_h = blockIdx.x / slices % p.shape.value_heads;
  const std::int64_t n = blockIdx.x / slices / p.shape.value_heads;
  const Sequence at = sequence_of(p, n);

  Columns<KD> columns;
  columns.part = lane % kParts;
  const int own = (warp * (32 / kParts) + lane / kParts) * kColumns;  // the thread's first column in the slice
  columns.column = first + own;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < columns.kKeys; ++i) columns.s[j][i] = 0;
  }
  if (p.initial_state) {
    columns.for_each(p.shape.key_dim, p.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
      s = p.initial_state(n, i_h, key, column);
    });
  }
  for (std::int64_t start = at.begin; start < at.end; start += kStage) {
    const int rows = static_cast<int>(min(std::int64_t{kStage}, at.end - start));
    __syncthreads();
    for (int r = warp; r < rows; r += kWarps) stage_token(p, at, start + r, i_h, first, r, lane, stage);
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      if (p.chunk_states && (start + r - at.begin) % at.interval == 0) {
        columns.for_each(p.shape.key_dim, p.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
          p.chunk_states(at.i_b, at.chunk(start + r), i_h, key, column) = s;
        });
      }
      float erased[kColumns] = {}, o[kColumns] = {};
      float k[Columns<KD>::kKeys];
#pragma unroll
      for (int i = 0; i < columns.kKeys; ++i) {
        const int key = i / 4 * 4 * kParts + 4 * columns.part + i % 4;
        k[i] = stage.k[r][key];
        const float decay = stage.decay[r][kChannel ? key : 0];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          columns.s[j][i] *= decay;
          erased[j] += columns.s[j][i] * k[i];
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int offset = 1; offset < kParts; offset *= 2) erased[j] += __shfl_xor_sync(0xffffffffU, erased[j], offset);
        erased[j] = stage.b[r] * stage.v[r][own + j] - stage.a[r] * erased[j];
      }
#pragma unroll
      for (int i = 0; i < columns.kKeys; ++i) {
        const float q = stage.q[r][i / 4 * 4 * kParts + 4 * columns.part + i % 4];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          columns.s[j][i] += k[i] * erased[j];
          o[j] += columns.s[j][i] * q;
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int offset = 1; offset < kParts; offset *= 2) o[j] += __shfl_xor_sync(0xffffffffU, o[j], offset);
        if (columns.part == 0 && columns.column + j < p.shape.value_dim) {
          p.o(at.i_b, start + r, i_h, columns.column + j) = from_state<T>(scale * o[j]);
        }
      }
    }
  }
  if (p.final_state) {
    columns.for_each(p.shape.key_dim, p.shape.value_dim,
                     [&](float& s, std::int64_t key, std::int64_t column) { p.final_state(n, i_h, key, column) = s; });
  }
}

template <int KD, bool kChannel, class T>
void launch(const DeltaForward<T>& p, cudaStream_t stream) {
  const std::int64_t slices = (p.shape.value_dim + kSlice - 1) / kSlice;
  const unsigned grid = grid_of("recurrent_fwd", p.shape.sequences() * p.shape.value_heads * slices);
  constexpr int kBytes = sizeof(Stage<KD, kChannel>);
  const auto kernel = recurrent_fwd_kernel<KD, kChannel, T>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  kernel<<<grid, kThreads, kBytes, stream>>>(p, static_cast<int>(slices),
                                             static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  check_launch("recurrent_fwd");
}

template <int KD, class T>
void launch(const DeltaForward<T>& p, cudaStream_t stream) {
  if (p.rule.decay == Decay::channel) return launch<KD, true>(p, stream);
  launch<KD, false>(p, stream);
}

}  // namespace

template <class T>
void recurrent_fwd(const DeltaForward<T>& p, cudaStream_t stream) {
  require_key_dim("recurrent_fwd", p.shape.key_dim);
  if (p.shape.key_dim <= 64) return launch<64>(p, stream);
  if (p.shape.key_dim <= 128) return launch<128>(p, stream);
  launch<256>(p, stream);
}

template void recurrent_fwd(const DeltaForward<float>&, cudaStream_t);
template void recurrent_fwd(const DeltaForward<bfloat16>&, cudaStream_t);

}  // namespace efla::gpu
