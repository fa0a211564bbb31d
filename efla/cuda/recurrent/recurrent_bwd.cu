// The gradients of the token recurrence of rule/problem.h in float32 (docs/ops/delta_rule.md has the equations,
// docs/design/2026-11-cuda-backward.md the choices).
//
// A thread block computes a sequence, a value head and a slice of kSlice value columns, from the last saved state to
// the first. From a saved state it goes forward and keeps S̃_t = D_t S_{t−1} of every token in the workspace, and u_t =
// b v − a e and e = S̃ᵀk in shared memory. Then it goes back. With dS the gradient with respect to S_t, and dO times the
// scale:
//
//   dS += q dOᵀ,   dk = dS u,   du = dSᵀ k,   dv = b du,   db = vᵀ du,   da = −eᵀ du,   de = −a du
//   dS += k deᵀ,   dq = S_t dO,   dk += S̃ de,   dg = rowsum(dS ∘ S̃),   dS ← D dS
//
// With two keys κ takes the place of k in e and in dS += k deᵀ, and S̃ de is dκ. Sums over value columns (dq, dk, dκ,
// dg, da, db) go to the workspace, one row per slice, token and value head. A second
// kernel, with one warp per token and query head, adds the rows in their order and computes the derivatives of the gain
// and of the L2 norm.
#include <algorithm>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/grad_tail.cuh"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/delta.h"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSlice = kWarps * 32 / kParts * kColumns;  // value columns per thread block
constexpr int kStage = 8;                                // tokens that are in shared memory at once
constexpr int kInterval = kRecurrentInterval;

// A row of sums in the workspace: dq [K], dk [K], with two keys dκ [K], dg [K, 1 or 0], da, db.
template <bool kTwoKeys>
struct RowLayout {
  static constexpr int kRows = kTwoKeys ? 3 : 2;  // rows [K] before dg
  std::int64_t keys, gates, floats;
  constexpr RowLayout(const DeltaShape& shape, const DeltaRule& rule)
      : keys(shape.key_dim),
        gates(rule.decay == Decay::channel  ? shape.key_dim
              : rule.decay == Decay::scalar ? 1
                                            : 0),
        floats(kRows * keys + gates + 2) {}
};

// How a problem is divided, and its workspace. An item is a sequence, a value head and a slice.
struct Plan {
  std::int64_t slices, items, blocks, rows, row_floats, block_floats;

  Plan(const DeltaShape& shape, const DeltaRule& rule)
      : slices((shape.value_dim + kSlice - 1) / kSlice),
        items(shape.sequences() * shape.value_heads * slices),
        blocks(std::min(items, kMostRecurrentBlocks)),
        rows(slices * shape.batch * shape.tokens * shape.value_heads),
        row_floats(rule.two_keys ? RowLayout<true>(shape, rule).floats : RowLayout<false>(shape, rule).floats),
        block_floats(kInterval * kSlice *
                     (shape.key_dim <= 64    ? 64
                      : shape.key_dim <= 128 ? 128
                                             : 256)) {}

  // Returns the bytes of the workspace. The states come first, so that their addresses are aligned.
  std::size_t bytes() const { return static_cast<std::size_t>(blocks * block_floats + rows * row_floats) * 4; }
};

// The shared memory of a thread block.
template <int KD, bool kChannel, bool kTwoKeys>
struct Memory {
  static constexpr int kRows = RowLayout<kTwoKeys>::kRows + (kChannel ? 1 : 0);
  static constexpr int kSums = kTwoKeys && KD > 128 ? 1 : 2;  // tokens whose sums are written together
  TokenStage<KD, kChannel, kTwoKeys, kSlice, kStage> stage;
  float dout[kStage][kSlice];  // dO times the scale
  float u[kInterval][kSlice], e[kInterval][kSlice];
  float sums[kSums][kWarps][kRows][KD];  // dq, dk, with two keys dκ, and with a channel gate dg
  float scalars[kSums][kWarps][3];       // da, db, dg of a scalar gate
};

// Returns the sum over the lanes that have the same columns.
__device__ __forceinline__ float part_sum(float x) {
#pragma unroll
  for (int offset = 1; offset < kParts; offset *= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}
// Returns the sum over the lanes that have the same keys.
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int offset = kParts; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Computes an item.
template <int KD, bool kChannel, bool kTwoKeys, class T>
class Walk {
 public:
  __device__ Walk(const DeltaBackward<T>& p, Memory<KD, kChannel, kTwoKeys>& memory, float2* states, float* rows,
                  int slices, float scale, std::int64_t item)
      : p_(p),
        memory_(memory),
        states_(states + threadIdx.x),
        layout_(p.shape, p.rule),
        slice_(item % slices),
        i_h_(item / slices % p.shape.value_heads),
        n_(item / slices / p.shape.value_heads),
        at_(sequence_of(p, n_)),
        scale_(scale),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        own_((warp_ * (32 / kParts) + lane_ / kParts) * kColumns),
        rows_(rows + slice_ * p.shape.batch * p.shape.tokens * p.shape.value_heads * layout_.floats) {
    dstate_.part = lane_ % kParts;
    dstate_.column = slice_ * kSlice + own_;
  }

  __device__ void run() {
    clear(dstate_);
    if (p_.dfinal_state) {
      dstate_.for_each(p_.shape.key_dim, p_.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
        s = p_.dfinal_state(n_, i_h_, key, column);
      });
    }
    const std::int64_t intervals = (at_.end - at_.begin + at_.interval - 1) / at_.interval;
    for (std::int64_t i = intervals - 1; i >= 0; --i) {
      const std::int64_t start = at_.begin + i * at_.interval;
      const int tokens = static_cast<int>(min(at_.interval, at_.end - start));
      forward(start, tokens);
      backward(start, tokens);
    }
    if (p_.dinitial_state) {
      dstate_.for_each(p_.shape.key_dim, p_.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
        p_.dinitial_state(n_, i_h_, key, column) = s;
      });
    }
  }

 private:
  __device__ static void clear(Columns<KD>& columns) {
#pragma unroll
    for (auto& column : columns.s) {
#pragma unroll
      for (float& x : column) x = 0;
    }
  }

  // Copies tokens [start + first, start + tokens), kStage at most, to shared memory. Ends with a barrier.
  __device__ void stage(std::int64_t start, int first, int tokens) {
    __syncthreads();
    for (int r = warp_; r < tokens - first && r < kStage; r += kWarps) {
      const std::int64_t t = start + first + r;
      stage_token<T>(p_, at_.i_b, t, i_h_, slice_ * kSlice, r, lane_, memory_.stage);
      for (int j = lane_; j < kSlice; j += 32) {
        const std::int64_t column = slice_ * kSlice + j;
        memory_.dout[r][j] = column < p_.shape.value_dim ? scale_ * to_float(p_.dout(at_.i_b, t, i_h_, column)) : 0.0F;
      }
    }
    __syncthreads();
  }

  // Goes forward over the tokens of an interval, which begins with token `start`.
  __device__ void forward(std::int64_t start, int tokens) {
    Columns<KD> state;
    state.part = dstate_.part;
    state.column = dstate_.column;
    clear(state);
    const std::int64_t chunk = at_.chunk(start);
    state.for_each(p_.shape.key_dim, p_.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
      s = p_.chunk_states(at_.i_b, chunk, i_h_, key, column);
    });
    for (int first = 0; first < tokens; first += kStage) {
      stage(start, first, tokens);
      for (int r = 0; r < kStage && first + r < tokens; ++r) advance(state, r, first + r);
    }
  }

  // Computes token r of the stage, which is number `token` of the interval.
  __device__ void advance(Columns<KD>& state, int r, int token) {
    const auto& stage = memory_.stage;
    float error[kColumns] = {}, k[Columns<KD>::kKeys];
#pragma unroll
    for (int i = 0; i < state.kKeys; ++i) {
      k[i] = stage.k[r][state.key(i)];
      const float decay = stage.decay[r][kChannel ? state.key(i) : 0];
      const float erase_key = kTwoKeys ? stage.erasing(r)[state.key(i)] : k[i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        state.s[j][i] *= decay;
        error[j] += state.s[j][i] * erase_key;
      }
      states_[(token * Columns<KD>::kKeys + i) * kThreads] = float2{state.s[0][i], state.s[1][i]};
    }
    float u[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      error[j] = part_sum(error[j]);
      u[j] = stage.b[r] * stage.v[r][own_ + j] - stage.a[r] * error[j];
      if (state.part == 0) {
        memory_.u[token][own_ + j] = u[j];
        memory_.e[token][own_ + j] = error[j];
      }
    }
#pragma unroll
    for (int i = 0; i < state.kKeys; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) state.s[j][i] += k[i] * u[j];
    }
  }

  // Goes back over the tokens of an interval.
  __device__ void backward(std::int64_t start, int tokens) {
    for (int first = (tokens - 1) / kStage * kStage; first >= 0; first -= kStage) {
      stage(start, first, tokens);
      int pending = 0;
      for (int r = min(kStage, tokens - first) - 1; r >= 0; --r) {
        retreat(start + first + r, r, first + r, pending++);
        if (pending < memory_.kSums && r > 0) continue;
        __syncthreads();
        write_sums(start + first + r, pending);
        __syncthreads();
        pending = 0;
      }
    }
  }

  // Computes the gradients of token t, which is number r of the stage and `token` of the interval. Leaves the warps'
  // sums in `row` of the sums.
  __device__ void retreat(std::int64_t t, int r, int token, int row) {
    const auto& stage = memory_.stage;
    float dout[kColumns], u[kColumns], du[kColumns] = {}, dk[Columns<KD>::kKeys];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      dout[j] = memory_.dout[r][own_ + j];
      u[j] = memory_.u[token][own_ + j];
    }
#pragma unroll
    for (int i = 0; i < dstate_.kKeys; ++i) {
      const float q = stage.q[r][dstate_.key(i)], k = stage.k[r][dstate_.key(i)];
      dk[i] = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float& s = dstate_.s[j][i];
        s += q * dout[j];
        dk[i] += s * u[j];
        du[j] += s * k;
      }
    }
    float da = 0, db = 0, dg = 0, de[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      du[j] = part_sum(du[j]);
      de[j] = -stage.a[r] * du[j];
      if (dstate_.part == 0) {
        da -= memory_.e[token][own_ + j] * du[j];
        db += stage.v[r][own_ + j] * du[j];
        if (dstate_.column + j < p_.shape.value_dim) {
          p_.dv(at_.i_b, t, i_h_, dstate_.column + j) = from_state<T>(stage.b[r] * du[j]);
        }
      }
    }
    auto& sums = memory_.sums[row][warp_];
#pragma unroll
    for (int i = 0; i < dstate_.kKeys; ++i) {
      const int key = dstate_.key(i);
      const float k = stage.k[r][key], decay = stage.decay[r][kChannel ? key : 0];
      const float2 pair = states_[(token * Columns<KD>::kKeys + i) * kThreads];
      const float state[kColumns] = {pair.x, pair.y};
      const float erase_key = kTwoKeys ? stage.erasing(r)[key] : k;
      float dq = 0, dgate = 0, derase_key = kTwoKeys ? 0 : dk[i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float& s = dstate_.s[j][i];
        s += erase_key * de[j];
        dq += (state[j] + k * u[j]) * dout[j];
        derase_key += state[j] * de[j];
        dgate += s * state[j];
        s *= decay;
      }
      dq = column_sum(dq);
      derase_key = column_sum(derase_key);
      if constexpr (kTwoKeys) dk[i] = column_sum(dk[i]);
      if constexpr (kChannel) dgate = column_sum(dgate);
      if (lane_ < kParts) {
        sums[0][key] = dq;
        sums[1][key] = kTwoKeys ? dk[i] : derase_key;
        if constexpr (kTwoKeys) sums[2][key] = derase_key;
        if constexpr (kChannel) sums[layout_.kRows][key] = dgate;
      }
      dg += dgate;
    }
    da = warp_sum(da);
    db = warp_sum(db);
    if constexpr (!kChannel) dg = warp_sum(dg);
    if (lane_ == 0) {
      memory_.scalars[row][warp_][0] = da;
      memory_.scalars[row][warp_][1] = db;
      memory_.scalars[row][warp_][2] = dg;
    }
  }

  // Writes the sums over the warps of `count` tokens. Token t is the first of them.
  __device__ void write_sums(std::int64_t t, int count) {
    constexpr int kRowSums = Memory<KD, kChannel, kTwoKeys>::kRows * KD;
    for (int at = threadIdx.x; at < count * (kRowSums + 3); at += kThreads) {
      const int row = at / (kRowSums + 3), element = at % (kRowSums + 3), key = element % KD;
      float* to =
          rows_ + ((at_.i_b * p_.shape.tokens + t + count - 1 - row) * p_.shape.value_heads + i_h_) * layout_.floats;
      if (element >= kRowSums) {
        const int scalar = element - kRowSums;
        if (scalar == 2 && (kChannel || layout_.gates == 0)) continue;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += memory_.scalars[row][w][scalar];
        to[scalar == 2 ? layout_.kRows * layout_.keys : layout_.kRows * layout_.keys + layout_.gates + scalar] = sum;
      } else if (key < layout_.keys) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += memory_.sums[row][w][element / KD][key];
        to[element / KD * layout_.keys + key] = sum;
      }
    }
  }

  const DeltaBackward<T>& p_;
  Memory<KD, kChannel, kTwoKeys>& memory_;
  float2* states_;
  const RowLayout<kTwoKeys> layout_;
  const std::int64_t slice_, i_h_, n_;
  const Sequence at_;
  const float scale_;
  const int lane_, warp_, own_;
  float* rows_;
  Columns<KD> dstate_;
};

template <int KD, bool kChannel, bool kTwoKeys, class T>
__global__ void __launch_bounds__(kThreads, 1)
    recurrent_bwd_kernel(const __grid_constant__ DeltaBackward<T> p, float* states, float* rows, std::int64_t items,
                         int slices, float scale) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* own = reinterpret_cast<float2*>(states + static_cast<std::int64_t>(blockIdx.x) * kInterval * KD * kSlice);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    Walk<KD, kChannel, kTwoKeys, T>(p, *reinterpret_cast<Memory<KD, kChannel, kTwoKeys>*>(memory), own, rows, slices,
                                    scale, item)
        .run();
  }
}

// Replaces dy by the gradient with respect to x of y = x/√(Σx² + ε), which is (dy − y · along) · factor. `along` is
// y·dy, plus with two keys κ·dκ, because the factor of k multiplies κ too.
template <int kCount>
__device__ __forceinline__ void l2_norm_bwd(const float (&y)[kCount], float factor, float along, float (&dy)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) dy[i] = factor * (dy[i] - along * y[i]);
}

// Adds the rows of a query head's value heads and of the slices. One warp per token and query head.
template <int KD, bool kTwoKeys, class T>
__global__ void __launch_bounds__(kThreads, kTwoKeys ? 1 : 0)  // 1: registers do not spill
    finish_kernel(const __grid_constant__ DeltaBackward<T> p, const float* rows, int slices) {
  const std::int64_t item = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const RowLayout<kTwoKeys> layout(p.shape, p.rule);
  const std::int64_t i_q = item % p.shape.heads, token = item / p.shape.heads, group = p.shape.group();
  const std::int64_t i_b = token / p.shape.tokens, t = token % p.shape.tokens;
  if (i_b >= p.shape.batch) return;
  const TokenRows<KD, kTwoKeys> of_token =
      normalised_rows(read_rows<KD, kTwoKeys, T>(p, i_b, t, i_q, lane), p.rule.qk_l2norm);
  const std::int64_t slice_floats = p.shape.batch * p.shape.tokens * p.shape.value_heads * layout.floats;
  float dq[KD / 32] = {}, dk[KD / 32] = {}, derase_key[KD / 32] = {};
  for (std::int64_t i_h = i_q * group; i_h < (i_q + 1) * group; ++i_h) {
    const float* head = rows + (token * p.shape.value_heads + i_h) * layout.floats;
    float da = 0, db = 0;
    for (int slice = 0; slice < slices; ++slice) {
      const float* from = head + slice * slice_floats;
#pragma unroll
      for (int i = 0; i < KD / 32; ++i) {
        if (lane + 32 * i >= layout.keys) continue;
        dq[i] += from[lane + 32 * i];
        dk[i] += from[layout.keys + lane + 32 * i];
        if constexpr (kTwoKeys) derase_key[i] += from[2 * layout.keys + lane + 32 * i];
      }
      da += from[layout.kRows * layout.keys + layout.gates];
      db += from[layout.kRows * layout.keys + layout.gates + 1];
    }
    for (std::int64_t gate = lane; gate < layout.gates; gate += 32) {
      float dg = 0;
      for (int slice = 0; slice < slices; ++slice) dg += head[slice * slice_floats + layout.kRows * layout.keys + gate];
      p.dg(i_b, t, i_h, gate) = dg;
    }
    const float beta = to_float(p.beta(i_b, t, i_h));
    const Gain<float> of_head =
        kTwoKeys ? two_key_gain(p.rule.step, beta, of_token.lambda) : gain(p.rule.step, beta, of_token.lambda);
    const float dalpha =
        static_cast<float>(p.rule.step.erase_scale) * da + static_cast<float>(p.rule.step.write_scale) * db;
    if (lane == 0) p.dbeta(i_b, t, i_h) = from_state<T>(beta_gradient(of_head, dalpha));
    if constexpr (kTwoKeys) {
      const float dmu = 0.5F * twice_lambda_gradient(of_head, dalpha);
#pragma unroll
      for (int i = 0; i < KD / 32; ++i) {
        dk[i] += dmu * (of_token.erase_key[i] * of_head.lambda_unit);
        derase_key[i] += dmu * (of_token.k[i] * of_head.lambda_unit);
      }
    } else {
      const float twice_dlambda = twice_lambda_gradient(of_head, dalpha);
#pragma unroll
      for (int i = 0; i < KD / 32; ++i) dk[i] += twice_dlambda * (of_token.k[i] * of_head.lambda_unit);
    }
  }
  if (p.rule.qk_l2norm) {
    l2_norm_bwd(of_token.q, of_token.q_factor, dot_rows(of_token.q, dq), dq);
    float along = dot_rows(of_token.k, dk);
    if constexpr (kTwoKeys) along += dot_rows(of_token.erase_key, derase_key);
    l2_norm_bwd(of_token.k, of_token.k_factor, along, dk);
  }
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    if (lane + 32 * i >= layout.keys) continue;
    p.dq(i_b, t, i_q, lane + 32 * i) = from_state<T>(dq[i]);
    p.dk(i_b, t, i_q, lane + 32 * i) = from_state<T>(dk[i]);
    if constexpr (kTwoKeys) {
      p.derase_key(i_b, t, i_q, lane + 32 * i) = from_state<T>(of_token.k_factor * derase_key[i]);
    }
  }
}

template <int KD, bool kChannel, bool kTwoKeys, class T>
void launch(const DeltaBackward<T>& p, const Plan& plan, const Workspace& workspace, cudaStream_t stream) {
  auto* states = static_cast<float*>(workspace.data);
  float* rows = states + plan.blocks * plan.block_floats;
  const int slices = static_cast<int>(plan.slices);
  constexpr int kBytes = sizeof(Memory<KD, kChannel, kTwoKeys>);
  static_assert(kBytes <= 99 * 1024);
  const auto kernel = recurrent_bwd_kernel<KD, kChannel, kTwoKeys, T>;
  launch_kernel("recurrent_bwd", kernel, static_cast<unsigned>(plan.blocks), kThreads, kBytes, stream, p, states, rows,
                plan.items, slices, static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  const unsigned grid =
      grid_of("recurrent_bwd", (p.shape.batch * p.shape.tokens * p.shape.heads + kWarps - 1) / kWarps);
  finish_kernel<KD, kTwoKeys><<<grid, kThreads, 0, stream>>>(p, rows, slices);
  check_launch("recurrent_bwd, finish");
}

template <int KD, bool kChannel, class T>
void launch(const DeltaBackward<T>& p, const Plan& plan, const Workspace& workspace, cudaStream_t stream) {
  if (p.rule.two_keys) return launch<KD, kChannel, true>(p, plan, workspace, stream);
  launch<KD, kChannel, false>(p, plan, workspace, stream);
}

template <int KD, class T>
void launch(const DeltaBackward<T>& p, const Plan& plan, const Workspace& workspace, cudaStream_t stream) {
  if (p.rule.decay == Decay::channel) return launch<KD, true>(p, plan, workspace, stream);
  launch<KD, false>(p, plan, workspace, stream);
}

}  // namespace

std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule) {
  return Plan(shape, rule).bytes();
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p, const Workspace& workspace, cudaStream_t stream) {
  require_key_dim("recurrent_bwd", p.shape.key_dim);
  if (p.saved.interval > kInterval) {
    throw Error("recurrent_bwd", "tokens between saved states", std::to_string(p.saved.interval),
                "at most " + std::to_string(kInterval));
  }
  const Plan plan(p.shape, p.rule);
  require_workspace("recurrent_bwd", workspace, plan.bytes());
  if (p.shape.key_dim <= 64) return launch<64>(p, plan, workspace, stream);
  if (p.shape.key_dim <= 128) return launch<128>(p, plan, workspace, stream);
  launch<256>(p, plan, workspace, stream);
}

template void recurrent_bwd(const DeltaBackward<float>&, const Workspace&, cudaStream_t);
template void recurrent_bwd(const DeltaBackward<bfloat16>&, const Workspace&, cudaStream_t);
template void recurrent_bwd(const DeltaBackward<float16>&, const Workspace&, cudaStream_t);

}  // namespace efla::gpu
