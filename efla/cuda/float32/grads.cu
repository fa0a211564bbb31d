// The gradients of the inputs, from S, dS', U and D of every chunk (Float32Backward), for all chunks at once. One
// thread block per chunk and query head loops over the value heads of the query head.
//
// Notation and equations of chunk/grads/grads_portable.cu, where the L2 norm is applied to keys and queries first, so
// that k̂ and q̂ are in shared memory.
//
// A warp computes 16 tokens and a part of the key channels of the gradients of keys and queries. Four warps compute W
// and four warps H, 16 × 16 elements each.
#include "efla/cuda/common/grad_tail.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/grads.cuh"

namespace efla::gpu {
namespace {

// Sums over the keys of a token, to which every part of the channels adds: k̂·X, and the terms r and w.
enum Sum { kErase, kRead, kWritten, kSums };

template <int KD, bool kGrouped>
struct Memory {
  static constexpr int kParts = 4, kWarps = 2 * kParts, kThreads = 32 * kWarps;  // kParts parts of the channels
  alignas(128) float k[kFloat32Tokens * KD], q[kFloat32Tokens * KD];             // after the L2 norm
  float state[kFloat32Columns * KD];  // of one slice: S, then dS'; afterwards M
  float dout[kFloat32Tokens * kFloat32Columns], d[kFloat32Tokens * kFloat32Columns];
  union {
    float u[kFloat32Tokens * kFloat32Columns];
    KeySums<kSums, kParts, kFloat32Tokens> sums;  // once U has been multiplied
  };
  float w[kFloat32Tokens * kFloat32Tokens], h[kFloat32Tokens * kFloat32Tokens];
  Float32Vectors vectors;
  float gamma[kFloat32Tokens], suffix[kFloat32Tokens];
  float db[kFloat32Tokens];
};

template <int KD, bool kGrouped>
class Grads : SliceGrads<KD, Memory<KD, kGrouped>> {
  using Base = SliceGrads<KD, Memory<KD, kGrouped>>;
  using Base::at_, Base::c_, Base::clear, Base::first_, Base::first_column_, Base::for_scores, Base::i_h_, Base::i_q_,
      Base::kThreads, Base::kTiles, Base::kWarps, Base::lane_, Base::m_, Base::multiply_slices, Base::p_, Base::part_,
      Base::of_queries_, Base::quadrant_, Base::slot_, Base::thread_, Base::wait_for_loads;
  using typename Base::Rows;

 public:
  __device__ Grads(const Float32Backward& c, Memory<KD, kGrouped>& memory, const ChunkAt& at, int slot, int i_q)
      : Base(c, memory, at, slot, i_q, threadIdx.x), gated_(p_.rule.decay == Decay::scalar) {}

  __device__ void run() {
    const int group = static_cast<int>(p_.shape.group());
    i_h_ = i_q_ * group;
    load_vectors();
    load_head();
    Rows dq, dk;
    if constexpr (kGrouped) {
      clear(dq);
      clear(dk);
      for (int i = 0; i < group; ++i, ++i_h_) {
        if (i > 0) load_vectors();
        Rows dq_of_head, dk_of_head;
        head_gradients(dq_of_head, dk_of_head);
#pragma unroll
        for (int j = 0; j < 4 * kTiles; ++j) {
          dq[j] += dq_of_head[j];
          dk[j] += dk_of_head[j];
        }
      }
    } else {
      head_gradients(dq, dk);
    }
    store(dq, m_.q, m_.vectors.query_factor, p_.dq);
    store(dk, m_.k, m_.vectors.key_factor, p_.dk);
  }

 private:
  // Loads keys and queries and applies the L2 norm. Ends with a barrier.
  __device__ void load_head() {
    load_tile<KD, kThreads>(m_.k, p_.k, at_.i_b, at_.start, at_.rows, i_q_, 0, c_.forward.k_rows, thread_);
    load_tile<KD, kThreads>(m_.q, p_.q, at_.i_b, at_.start, at_.rows, i_q_, 0, c_.forward.q_rows, thread_);
    wait_for_loads();
    if (!p_.rule.qk_l2norm) return;
    for (int i = thread_; i < kFloat32Tokens * KD; i += kThreads) {
      m_.k[i] *= m_.vectors.key_factor[i / KD];
      m_.q[i] *= m_.vectors.query_factor[i / KD];
    }
    __syncthreads();
  }

  // Loads the vectors of a value head and computes its decays. Ends with a barrier.
  __device__ void load_vectors() {
    load_image<kThreads>(&m_.vectors, &c_.forward.vectors[slot_ * p_.shape.value_heads + i_h_], sizeof(Float32Vectors),
                         thread_);
    wait_for_loads();
    if (thread_ < kFloat32Tokens) {
      const double prefix = m_.vectors.prefix[thread_];
      m_.gamma[thread_] = expf(static_cast<float>(prefix));
      m_.suffix[thread_] = expf(static_cast<float>(m_.vectors.prefix[kFloat32Tokens - 1] - prefix));
    }
    __syncthreads();
  }

  // Computes the gradients of q̂ and k̂ of a value head and writes the gradients of v, beta and g.
  __device__ void head_gradients(Rows& dq, Rows& dk) {
    float scores[8] = {}, z = 0;
    Rows x;
    float db =
        multiply_slices(scores, dq, x, dk, [&](const float* states) { z += gated_ ? state_product(states) : 0.0F; });
    db = lane_sum<kThreads / kFloat32Tokens>(db);
    if (thread_ % (kThreads / kFloat32Tokens) == 0) m_.db[thread_ / (kThreads / kFloat32Tokens)] = db;
    finish_states(dq, x, dk, z);
    finish_scores(scores);
    multiply_scores(dq, x, dk);
    finish_tokens(dk);
  }

  // Returns the thread's part of S·dS', with S in global memory.
  __device__ float state_product(const float* states) {
    float sum = 0;
#pragma unroll 4
    for (int i = thread_; i < kFloat32Columns * KD / 4; i += kThreads) {
      const float4 x = reinterpret_cast<const float4*>(states)[i], y = reinterpret_cast<const float4*>(m_.state)[i];
      sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
    return sum;
  }

  // Calls f(r, row, pair of the tile, pair of x) for the lane's pairs of channels. r is 0 for the first of the lane's
  // two rows, 1 for the second.
  template <class F>
  __device__ void for_pairs(const float* tile, Rows& x, F&& f) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int row = first_ + lane_ / 4 + 8 * (i % 2), column = 8 * (kTiles * part_ + i / 2) + 2 * (lane_ % 4);
      f(i % 2, row, *reinterpret_cast<const float2*>(tile + tile_index<KD>(row, column)), x + 2 * i);
    }
  }

  __device__ void put_sums(int kind, const float (&sums)[2]) {
    m_.sums.put(kind, part_, first_ + lane_ / 4, sums, lane_);
  }
  // As m_.sums.total, but with a loop over references the compiler reads single numbers, not vectors, and moves fewer.
  __device__ float sum_of(int kind, int row) const {
    float sum = 0;
#pragma unroll
    for (const auto& part : m_.sums.of[kind]) sum += part[row];
    return sum;
  }

  // Applies the decays from the chunk's start and to its end, and writes r, w and the warp's part of z.
  __device__ void finish_states(Rows& dq, Rows& x, Rows& dk, float z) {
    float read[2] = {}, written[2] = {};
    for_pairs(m_.q, dq, [&](int r, int row, float2 q, float* pair) {
      const float factor = c_.forward.scale * m_.gamma[row];
      pair[0] *= factor;
      pair[1] *= factor;
      read[r] += q.x * pair[0] + q.y * pair[1];
    });
    for_pairs(m_.k, x, [&](int r, int row, float2 k, float* pair) {
      pair[0] *= m_.gamma[row];
      pair[1] *= m_.gamma[row];
      read[r] -= m_.vectors.a[row] * (k.x * pair[0] + k.y * pair[1]);
    });
    for_pairs(m_.k, dk, [&](int r, int row, float2 k, float* pair) {
      pair[0] *= m_.suffix[row];
      pair[1] *= m_.suffix[row];
      written[r] += k.x * pair[0] + k.y * pair[1];
    });
    if (!gated_) return;
    put_sums(kRead, read);
    put_sums(kWritten, written);
    z = lane_sum<32>(z);
    if (lane_ == 0) m_.dout[thread_ / 32] = z;
  }

  // Writes W and H and, if there are gates, Σ_{i≥t>j} M_ij to dg. Ends with a barrier.
  __device__ void finish_scores(float (&scores)[8]) {
    float* const to = of_queries_ ? m_.w : m_.h;
    for_scores([&](int i, int row, int column) {
      float factor = of_queries_ ? c_.forward.scale : 1.0F;
      if (gated_) factor *= expf(static_cast<float>(m_.vectors.prefix[row] - m_.vectors.prefix[column]));
      scores[i] = column < row || (of_queries_ && column == row) ? factor * scores[i] : 0.0F;
      to[tile_index<kFloat32Tokens>(row, column)] = scores[i];
    });
    if (gated_) {
      float products[8] = {};
      if (first_column_ <= first_) {
#pragma unroll 1
        for (int step = 0; step < KD / 8; ++step) {
          const int lane = opaque(lane_) & 31;  // addresses are computed here
          const auto rows = row_operand<KD>(shared_address(of_queries_ ? m_.q : m_.k), first_, 8 * step, lane);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_rows<KD>(products + 4 * i, rows, shared_address(m_.k), first_column_ + 8 * i, 8 * step, lane);
          }
        }
      }
      for (int turn = 0; turn < 2; ++turn) {
        if (quadrant_ / 4 == turn) {
          for_scores([&](int i, int row, int column) {
            float& element = m_.state[row * (kFloat32Tokens + 1) + column];
            const float product = scores[i] * products[i];
            element = turn == 0 ? product : element - m_.vectors.a[row] * product;
          });
        }
        __syncthreads();
      }
      spanning_sums();
    }
    __syncthreads();
  }

  // Writes Σ_{i≥t>j} M_ij of every token t to dg.
  __device__ void spanning_sums() {
    if (thread_ >= kFloat32Tokens) return;
    sum_before<kFloat32Tokens>(m_.state, thread_);
    __syncwarp();
    const float sum = sum_from<kFloat32Tokens>(m_.state, thread_);
    if (thread_ < at_.rows) p_.dg(at_.i_b, at_.start + thread_, i_h_, 0) = sum;
  }

  // Reads the transposed of rows [8 · step, 8 · step + 8) of a matrix as an operand, times minus one factor per row.
  __device__ Operand transposed_operand(const float* matrix, const float* factors, int step, int lane) {
    const int at = 8 * step + 2 * (lane % 4), own = first_ + lane / 4;
    const float low = -factors[at], high = -factors[at + 1];
    const float x[4] = {low * matrix[tile_index<kFloat32Tokens>(at, own)],
                        high * matrix[tile_index<kFloat32Tokens>(at + 1, own)],
                        low * matrix[tile_index<kFloat32Tokens>(at, own + 8)],
                        high * matrix[tile_index<kFloat32Tokens>(at + 1, own + 8)]};
    return operand_of(x);
  }

  // Adds the products with W and H, and computes −da.
  __device__ void multiply_scores(Rows& dq, Rows& x, Rows& dk) {
#pragma unroll 1
    for (int step = 0; step < (first_ + 16) / 8; ++step) {
      const int lane = opaque(lane_) & 31;  // addresses are computed here
      this->template multiply_tile<KD>(dq, row_operand<kFloat32Tokens>(shared_address(m_.w), first_, 8 * step, lane),
                                       shared_address(m_.k), step, lane);
      this->template multiply_tile<KD>(x, row_operand<kFloat32Tokens>(shared_address(m_.h), first_, 8 * step, lane),
                                       shared_address(m_.k), step, lane);
    }
#pragma unroll 1
    for (int step = first_ / 8; step < kFloat32Tokens / 8; ++step) {
      const int lane = opaque(lane_) & 31;  // addresses are computed here
      this->template multiply_tile<KD>(dk, column_operand<kFloat32Tokens>(shared_address(m_.w), 8 * step, first_, lane),
                                       shared_address(m_.q), step, lane);
      this->template multiply_tile<KD>(dk, transposed_operand(m_.h, m_.vectors.a, step, lane), shared_address(m_.k),
                                       step, lane);
    }
    float erase[2] = {};
    for_pairs(m_.k, x, [&](int r, int, float2 k, const float* pair) { erase[r] += k.x * pair[0] + k.y * pair[1]; });
    put_sums(kErase, erase);
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) dk[i] -= m_.vectors.a[first_ + lane_ / 4 + 8 * (i / 2 % 2)] * x[i];
    __syncthreads();
  }

  // Writes dbeta and dg, and adds the gradient through λ to dk. Ends with a barrier.
  __device__ void finish_tokens(Rows& dk) {
    if (gated_ && thread_ < at_.rows) {
      float& dg = p_.dg(at_.i_b, at_.start + thread_, i_h_, 0);
      float sum = dg, z = 0;
      for (int w = 0; w < kWarps; ++w) z += m_.dout[w];
      for (int i = kFloat32Tokens - 1; i >= thread_; --i) sum += sum_of(kRead, i);
      for (int j = 0; j < thread_; ++j) sum += sum_of(kWritten, j);
      dg = sum + m_.gamma[kFloat32Tokens - 1] * z;
    }
    float twice_dlambda = 0, unit = 0;
    if (thread_ < kFloat32Tokens) {
      const float beta = thread_ < at_.rows ? to_float(p_.beta(at_.i_b, at_.start + thread_, i_h_)) : 0.0F;
      const float dalpha = -static_cast<float>(p_.rule.step.erase_scale) * sum_of(kErase, thread_) +
                           static_cast<float>(p_.rule.step.write_scale) * m_.db[thread_];
      const Gain<float> of_token = gain(p_.rule.step, beta, m_.vectors.lambda[thread_]);
      if (thread_ < at_.rows) {
        p_.dbeta(at_.i_b, at_.start + thread_, i_h_) = beta_gradient(of_token, dalpha);
      }
      twice_dlambda = twice_lambda_gradient(of_token, dalpha);
      unit = of_token.lambda_unit;
    }
    __syncthreads();  // the sums have been read
    if (thread_ < kFloat32Tokens) {
      m_.sums.of[kErase][0][thread_] = twice_dlambda;
      m_.sums.of[kErase][1][thread_] = unit;
    }
    __syncthreads();
    for_pairs(m_.k, dk, [&](int, int row, float2 k, float* pair) {
      const float factor = m_.sums.of[kErase][0][row], of_row = m_.sums.of[kErase][1][row];
      pair[0] += factor * (of_row * k.x);
      pair[1] += factor * (of_row * k.y);
    });
    __syncthreads();
  }

  // Applies the backward of the L2 norm, whose results are in `tile`, and stores the gradient of k or q.
  __device__ void store(Rows& gradient, const float* tile, const float* factors, const View<float, 4>& to) {
    if (p_.rule.qk_l2norm) {
      float along[2] = {};
      for_pairs(tile, gradient,
                [&](int r, int, float2 x, const float* pair) { along[r] += x.x * pair[0] + x.y * pair[1]; });
      put_sums(kErase, along);
      __syncthreads();
      for_pairs(tile, gradient, [&](int, int row, float2 x, float* pair) {
        const float sum = sum_of(kErase, row);
        pair[0] = factors[row] * (pair[0] - sum * x.x);
        pair[1] = factors[row] * (pair[1] - sum * x.y);
      });
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int row = first_ + lane_ / 4 + 8 * (i / 2 % 2);
      const int column = 8 * (kTiles * part_ + i / 4) + 2 * (lane_ % 4) + i % 2;
      if (row < at_.rows && column < p_.shape.key_dim) {
        to(at_.i_b, at_.start + row, i_q_, column) = gradient[i];
      }
    }
  }

  const bool gated_;
};

template <int KD, bool kGrouped>
__global__ void __launch_bounds__(Memory<KD, kGrouped>::kThreads, kGrouped ? 1 : 2)
    grads_kernel(const __grid_constant__ Float32Backward c) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int heads = static_cast<int>(c.p.shape.heads), slot = static_cast<int>(blockIdx.x) / heads,
            i_q = static_cast<int>(blockIdx.x) % heads;
  const ChunkAt at = chunk_at(c.forward, slot);
  if (at.rows == 0) return;
  Grads<KD, kGrouped>(c, *reinterpret_cast<Memory<KD, kGrouped>*>(shared), at, slot, i_q).run();
}

template <int KD, bool kGrouped>
void launch(const Float32Backward& c, cudaStream_t stream) {
  using Shared = Memory<KD, kGrouped>;
  static_assert(sizeof(Shared) <= 99 * 1024);
  launch_kernel("chunk_float32, grads", grads_kernel<KD, kGrouped>,
                grid_of("chunk_float32", c.forward.slots * c.p.shape.heads), Shared::kThreads, sizeof(Shared), stream,
                c);
}

template <int KD>
void launch(const Float32Backward& c, cudaStream_t stream) {
  c.p.shape.group() > 1 ? launch<KD, true>(c, stream) : launch<KD, false>(c, stream);
}

}  // namespace

void launch_float32_grads(const Float32Backward& c, cudaStream_t stream) {
  float32_keys(c.p.shape) == 64 ? launch<64>(c, stream) : launch<128>(c, stream);
}

}  // namespace efla::gpu
