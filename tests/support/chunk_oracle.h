// The chunkwise forward of the CUDA kernels in float32 on the CPU, with rounding at exactly the kernels' points. What
// differs from a kernel is the order of sums. Its distance from the float64 reference is the accuracy of the algorithm;
// a kernel's distance from it is a fault of the kernel.
//
// bfloat16 and float16 inputs (efla/cuda/chunk/chunk.h): the blocks of the inverse in TF32, and in the inputs' type T
// and P, the state as an operand, the residual R, U and write∘U, the outputs, and with a gate per channel or two keys
// the decayed keys and queries, which for float16 are multiplied by powers of two first; maps of segments and the
// states that they multiply in two parts of that type. float32 inputs (efla/cuda/float32/float32.h): every operand of a
// product, but for inverses and for products of a channel's tokens within a block, as the sum of two TF32 numbers.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "efla/rule/problem.h"

namespace efla::test {

// The limit of an error is bfloat16's limit times this. float16 has three bits more than bfloat16, so that its rounding
// errors are an eighth as large. The inverse is merged in TF32, which rounds as much as float16; with the errors that
// this adds, the limit is a seventh.
template <class E>
constexpr double kUnit = std::is_same_v<E, float16> ? 1.0 / 7 : 1.0;

// Rounds to T, bfloat16 or float16.
template <class T>
float through(float x) {
  return to_float(from_state<T>(x));
}

// Drops the bits that TF32 does not have, as the tensor cores do.
inline float through_tf32(float x) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xffffe000U); }

inline float nearest_tf32(float x) {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x1000U) & 0xffffe000U);
}

// Two numbers of type T whose sum is nearer to x than one of them.
template <class T>
std::array<float, 2> parts_of(float x) {
  const float high = through<T>(x);
  return {high, through<T>(x - high)};
}

// What the kernels for inputs of a type do: bfloat16 or float16.
template <class T>
struct ChunkArithmetic {
  static constexpr int kTokens = 64, kBlock = 16;  // tokens per chunk, and per block of it
  static constexpr bool kSubstitutes = false;      // instead of multiplying with an inverse
  using Log = float;                               // of a product of decays
  // With a gate per key channel: whether keys and queries are brought to a length near 1, how much rows of products of
  // tokens are then multiplied by, and the largest log2 of a decay to or from a block's token.
  static constexpr bool kUnitRows = std::is_same_v<T, float16>;
  static constexpr float kHeadroom = kUnitRows ? 4 : 1, kRange = kUnitRows ? 12 : 60;

  static float operand(float x) { return through<T>(x); }
  // An operand of the products that make the inverse. Dropped bits would be as much as float16 rounds.
  static float inverse_operand(float x) { return std::is_same_v<T, float16> ? nearest_tf32(x) : through_tf32(x); }
  static float times(float x, float y) { return x * y; }
  // The product of an element of a segment's map and one of a state.
  static float map(float x, float y) {
    const auto [high_x, low_x] = parts_of<T>(x);
    const auto [high_y, low_y] = parts_of<T>(y);
    return high_x * high_y + low_x * high_y + high_x * low_y;
  }
};

template <>
struct ChunkArithmetic<float> {
  static constexpr int kTokens = 32, kBlock = 8;
  static constexpr bool kSubstitutes = true;
  using Log = double;
  static constexpr bool kUnitRows = false;
  static constexpr float kHeadroom = 1, kRange = 60;

  static float operand(float x) { return x; }
  static float inverse_operand(float x) { return x; }
  static float times(float x, float y) {
    const float big_x = nearest_tf32(x), big_y = nearest_tf32(y);
    const float small_x = through_tf32(x - big_x), small_y = through_tf32(y - big_y);
    return big_x * big_y + (small_x * big_y + big_x * small_y);
  }
  static float map(float x, float y) { return x * y; }
};

// The decays of one channel within blocks of a chunk: exponentials of sums of g, or of float32 inputs products of the
// tokens' decays.
template <class T>
class ChannelDecays {
 public:
  static constexpr int kTokens = ChunkArithmetic<T>::kTokens, kBlock = ChunkArithmetic<T>::kBlock;

  explicit ChannelDecays(const std::array<float, kTokens>& g) {
    for (int i = 0; i < kTokens; ++i) {
      sum_[i] = (i % kBlock > 0 ? sum_[i - 1] : 0.0F) + g[i];
      of_token_[i] = std::exp(g[i]);
    }
  }

  // From token j to token i of the same block.
  float between(int j, int i) const {
    if constexpr (!std::is_same_v<T, float>) return std::exp(sum_[i] - sum_[j]);
    float decay = 1;
    for (int t = j + 1; t <= i; ++t) decay *= of_token_[t];
    return decay;
  }
  // From the start of the block to the token, from the token to the block's end, and over a whole block.
  float from_start(int i) const {
    if constexpr (!std::is_same_v<T, float>) return std::exp(sum_[i]);
    const int first = i / kBlock * kBlock;
    return of_token_[first] * between(first, i);
  }
  float to_end(int i) const { return between(i, i / kBlock * kBlock + kBlock - 1); }
  float over(int block) const { return from_start(kBlock * block + kBlock - 1); }
  // Over the blocks [first, last).
  float over(int first, int last) const {
    float decay = 1;
    for (int block = first; block < last; ++block) decay *= over(block);
    return decay;
  }

 private:
  std::array<float, kTokens> of_token_{}, sum_{};  // the sum of g from the block's start to the token
};

// One value head of one sequence.
template <class T>
class ChunkOracle {
 public:
  static constexpr int kTokens = ChunkArithmetic<T>::kTokens;
  static constexpr int kBlock = ChunkArithmetic<T>::kBlock, kBlocks = kTokens / kBlock;
  static constexpr bool kSubstitutes = ChunkArithmetic<T>::kSubstitutes;

  ChunkOracle(const DeltaForward<T>& p, std::int64_t n, std::int64_t i_h, int segments)
      : p_(p),
        at_(sequence_of(p, n)),
        n_(n),
        i_h_(i_h),
        i_q_(i_h / p.shape.group()),
        segments_(segments),
        keys_(p.shape.key_dim),
        columns_(p.shape.value_dim) {}

  // Segments (efla/cuda/chunk/sweep/segments.cc): the state before each of them first, then all outputs.
  void run() {
    State state(keys_ * columns_);
    for (std::int64_t i = 0; i < keys_ * columns_ && p_.initial_state; ++i) {
      state[i] = p_.initial_state(n_, i_h_, i / columns_, i % columns_);
    }
    const std::int64_t chunks = (at_.end - at_.begin + kTokens - 1) / kTokens;
    const std::int64_t length = (chunks + segments_ - 1) / segments_ * kTokens;
    for (int i = 0; i < segments_; ++i) {
      const std::int64_t begin = std::min(at_.begin + i * length, at_.end), end = std::min(begin + length, at_.end);
      State before = state;
      if (i == 0) {
        walk(begin, end, state, columns_, true, true);
        continue;
      }
      if (i + 1 < segments_) {
        State map(keys_ * keys_), zeros(keys_ * columns_);
        for (std::int64_t x = 0; x < keys_; ++x) map[x * keys_ + x] = 1;
        walk(begin, end, map, keys_, false, false);
        walk(begin, end, zeros, columns_, true, false);
        state = zeros;
        for (std::int64_t x = 0; x < keys_; ++x) {
          for (std::int64_t y = 0; y < keys_; ++y) {
            for (std::int64_t j = 0; j < columns_; ++j)
              state[x * columns_ + j] += ChunkArithmetic<T>::map(map[x * keys_ + y], before[y * columns_ + j]);
          }
        }
      }
      walk(begin, end, i + 1 < segments_ ? before : state, columns_, true, true);
    }
    for (std::int64_t i = 0; i < keys_ * columns_ && p_.final_state; ++i) {
      p_.final_state(n_, i_h_, i / columns_, i % columns_) = state[i];
    }
  }

 protected:  // for the backward's oracle (chunk_bwd_oracle.h)
  using Matrix = std::array<std::array<float, kTokens>, kTokens>;
  using State = std::vector<float>;
  using Log = typename ChunkArithmetic<T>::Log;

  // Walks the chunks of [begin, end) with a state of `columns` columns, with values or without, and writes outputs.
  void walk(std::int64_t begin, std::int64_t end, State& state, std::int64_t columns, bool values, bool outputs) {
    for (std::int64_t start = begin; start < end; start += kTokens) {
      const int rows = static_cast<int>(std::min<std::int64_t>(kTokens, at_.end - start));
      if (outputs) save(start, state);
      prepare(start, rows);
      sweep(start, rows, state, columns, values, outputs);
    }
  }

  void save(std::int64_t t, const State& state) const {
    if (!p_.chunk_states || (t - at_.begin) % at_.interval != 0) return;
    for (std::int64_t i = 0; i < keys_ * columns_; ++i)
      p_.chunk_states(at_.i_b, at_.chunk(t), i_h_, i / columns_, i % columns_) = state[i];
  }

  // Returns whether the kernels read decayed rows. A gate per head is then the gate of every key channel.
  bool decays_rows() const { return p_.rule.decay == Decay::channel || p_.rule.two_keys; }

  // Returns the log of the decay of token t in key channel x, for decayed rows.
  float channel_gate(std::int64_t t, std::int64_t x) const {
    if (p_.rule.decay == Decay::none) return 0;
    return limited(p_.g(at_.i_b, t, i_h_, p_.rule.decay == Decay::channel ? x : 0));
  }

  // Elements of the chunk's keys, erase keys and queries, times the powers of two of their tokens.
  float key(std::int64_t t, std::int64_t i) const {
    return key_unit_[t - start_] * to_float(p_.k(at_.i_b, t, i_q_, i));
  }
  float erase_key(std::int64_t t, std::int64_t i) const {
    return p_.rule.two_keys ? erase_unit_[t - start_] * to_float(p_.erase_key(at_.i_b, t, i_q_, i)) : key(t, i);
  }
  float query(std::int64_t t, std::int64_t i) const {
    return query_unit_[t - start_] * to_float(p_.q(at_.i_b, t, i_q_, i));
  }

  // The power of two that brings a row of which the sum of squares is given to a length in [1, 2).
  float unit_of(float squares) const {
    if (!ChunkArithmetic<T>::kUnitRows || !decays_rows()) return 1;
    const float x = squares + (p_.rule.qk_l2norm ? static_cast<float>(kL2NormEpsilon) : std::ldexp(1.0F, -12));
    const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(x) >> 23) - 127;
    return std::ldexp(1.0F, -(exponent >> 1));
  }

  // Fills T, P and the vectors.
  void prepare(std::int64_t start, int rows) {
    const auto& step = p_.rule.step;
    const auto scale = static_cast<float>(p_.rule.scale_for(keys_));
    const auto epsilon = static_cast<float>(kL2NormEpsilon);
    std::array<float, kTokens> g{};
    start_ = start;
    key_unit_.fill(1);
    query_unit_.fill(1);
    erase_unit_.fill(1);
    for (int r = 0; r < rows; ++r) {
      float k = 0, q = 0, e = 0, mu = 0;
      for (std::int64_t i = 0; i < keys_; ++i) {
        k += key(start + r, i) * key(start + r, i);
        q += query(start + r, i) * query(start + r, i);
        e += erase_key(start + r, i) * erase_key(start + r, i);
        mu += erase_key(start + r, i) * key(start + r, i);
      }
      n_k_[r] = p_.rule.qk_l2norm ? 1 / std::sqrt(k + epsilon) : 1.0F;
      n_q_[r] = p_.rule.qk_l2norm ? 1 / std::sqrt(q + epsilon) : 1.0F;
      if (p_.rule.decay == Decay::scalar && !decays_rows()) g[r] = limited(p_.g(at_.i_b, start + r, i_h_, 0));
      prefix_[r] = (r > 0 ? prefix_[r - 1] : Log(0)) + g[r];
      const float beta = to_float(p_.beta(at_.i_b, start + r, i_h_)), norm = n_k_[r] * n_k_[r];
      const float alpha = p_.rule.two_keys ? two_key_alpha(step, beta, mu * norm) : gain_alpha(step, beta, k * norm);
      erase_[r] = static_cast<float>(step.erase_scale) * alpha;
      b_[r] = static_cast<float>(step.write_scale) * alpha;
      key_unit_[r] = unit_of(k);
      query_unit_[r] = unit_of(q);
      erase_unit_[r] = p_.rule.two_keys ? unit_of(e) : key_unit_[r];
      n_e_[r] = n_k_[r] / erase_unit_[r];
      n_k_[r] /= key_unit_[r];
      n_q_[r] /= query_unit_[r];
      read_[r] = erase_[r] * decay_of(prefix_[r]) * n_e_[r];
      out_[r] = scale * decay_of(prefix_[r]) * n_q_[r];
    }
    decay_ = decay_of(prefix_[rows - 1]);
    Log suffix = 0;
    for (int r = rows - 1; r >= 0; --r) {
      write_[r] = n_k_[r] * decay_of(suffix);
      suffix += g[r];
    }
    Matrix a{}, t{}, kk_matrix{}, qk_matrix{};
    if (decays_rows()) {
      if constexpr (std::is_same_v<T, float>) {
        multiply_decayed(start, rows, kk_matrix, qk_matrix);
      } else {
        multiply_channels(start, rows, kk_matrix, qk_matrix);
      }
    } else {
      multiply_rows(start, rows, kk_matrix, qk_matrix);
    }
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j <= i; ++j) {
        const float kk = kk_matrix[i][j], qk = qk_matrix[i][j], decay = decay_of(prefix_[i] - prefix_[j]);
        if (j < i) a[i][j] = erase_[i] * n_e_[i] * n_k_[j] * kk * decay;
        p_matrix_[i][j] = operand(scale * n_q_[i] * n_k_[j] * qk * decay);
      }
    }
    if constexpr (kSubstitutes) {
      prepare_substitution(a);
      return;
    }
    invert(a, t, rows);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j <= i; ++j) t_[i][j] = operand(t[i][j]);
    }
  }

  static float decay_of(Log log) { return std::exp(static_cast<float>(log)); }
  static float operand(float x) { return ChunkArithmetic<T>::operand(x); }
  static float inverse_operand(float x) { return ChunkArithmetic<T>::inverse_operand(x); }
  static float times(float x, float y) { return ChunkArithmetic<T>::times(x, y); }

  static float limited(float g) { return g < -120.0F ? -120.0F : g; }

  // K Kᵀ and Q Kᵀ, and the rows that the sweep multiplies.
  void multiply_rows(std::int64_t start, int rows, Matrix& kk, Matrix& qk) {
    read_keys_.assign(kTokens * keys_, 0);
    read_queries_ = read_keys_;
    for (int i = 0; i < rows; ++i) {
      for (std::int64_t x = 0; x < keys_; ++x) {
        read_keys_[i * keys_ + x] = key(start + i, x);
        read_queries_[i * keys_ + x] = query(start + i, x);
      }
    }
    write_keys_ = read_keys_;
    decays_.assign(keys_, decay_);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j <= i; ++j) {
        for (std::int64_t x = 0; x < keys_; ++x) {
          kk[i][j] += times(read_keys_[i * keys_ + x], read_keys_[j * keys_ + x]);
          qk[i][j] += times(read_queries_[i * keys_ + x], read_keys_[j * keys_ + x]);
        }
      }
    }
  }

  // The same with a gate per channel: Γ of tokens i and j is a factor of i times one of j, the decays from and to a
  // token between them, both rounded with their rows. A block of 16 tokens i has one such token, the last before its
  // first or, where no decay from or to it leaves the range of exponents, its eighth. Where one does, pairs of the
  // block's own tokens are added in float32.
  void multiply_channels(std::int64_t start, int rows, Matrix& kk, Matrix& qk) {
    constexpr float kRange = ChunkArithmetic<T>::kRange * 0.6931472F, kHeadroom = ChunkArithmetic<T>::kHeadroom;
    read_keys_.assign(kTokens * keys_, 0);
    read_queries_ = write_keys_ = read_keys_;
    decays_.assign(keys_, 0);
    for (std::int64_t x = 0; x < keys_; ++x) {
      std::array<float, kTokens> local{};  // the sum of g from the block's start to the token
      std::array<float, kBlocks> total{}, middle{};
      std::array<bool, kBlocks> deep{};
      for (int i = 0; i < kTokens; ++i) {
        const float g = i < rows ? channel_gate(start + i, x) : 0.0F;
        local[i] = (i % kBlock > 0 ? local[i - 1] : 0.0F) + g;
      }
      for (int block = 0; block < kBlocks; ++block) {
        total[block] = local[kBlock * block + kBlock - 1];
        middle[block] = local[kBlock * block + 7];
        deep[block] = std::abs(middle[block]) > kRange;
        for (int i = kBlock * block; i < kBlock * (block + 1); ++i)
          deep[block] = deep[block] || std::abs(local[i] - middle[block]) > kRange;
        if (deep[block]) middle[block] = 0;
      }
      const auto between = [&](int first, int last) {  // decay over the blocks [first, last)
        float sum = 0;
        for (int block = first; block < last; ++block) sum += total[block];
        return sum;
      };
      decays_[x] = std::exp(between(0, kBlocks));
      for (int i = 0; i < rows; ++i) {
        const int block = i / kBlock;
        const float k = key(start + i, x), q = query(start + i, x), e = erase_key(start + i, x);
        const float before = std::exp(local[i]) * std::exp(between(0, block));
        read_keys_[i * keys_ + x] = operand(e * before);
        read_queries_[i * keys_ + x] = operand(q * before);
        write_keys_[i * keys_ + x] =
            operand(k * (std::exp(total[block] - local[i]) * std::exp(between(block + 1, kBlocks))));
        const float row = std::exp(local[i] - middle[block]);
        const float e_row = operand(kHeadroom * e * row) / kHeadroom, q_row = operand(kHeadroom * q * row) / kHeadroom;
        for (int j = 0; j <= i; ++j) {
          const int other = j / kBlock;
          const float k_j = key(start + j, x);
          if (other == block && deep[block]) {
            const float decay = std::exp(local[i] - local[j]);
            kk[i][j] += e * k_j * decay;
            qk[i][j] += q * k_j * decay;
            continue;
          }
          const float to_middle = other == block ? middle[block] - local[j]
                                                 : total[other] - local[j] + between(other + 1, block) + middle[block];
          const float column = operand(kHeadroom * k_j * std::exp(to_middle)) / kHeadroom;
          kk[i][j] += e_row * column;
          qk[i][j] += q_row * column;
        }
      }
    }
  }

  // The decays of a channel in a chunk; tokens that do not exist have none.
  ChannelDecays<T> channel_decays(std::int64_t start, int rows, std::int64_t x) const {
    std::array<float, kTokens> g{};
    for (int i = 0; i < rows; ++i) g[i] = channel_gate(start + i, x);
    return ChannelDecays<T>(g);
  }

  // The same for float32: the token between two is the end of the earlier one's block, or the chunk's middle if the
  // middle is between both. Pairs of a block's own tokens are added in float32.
  void multiply_decayed(std::int64_t start, int rows, Matrix& kk, Matrix& qk) {
    constexpr int kMiddle = kBlocks / 2;
    read_keys_.assign(kTokens * keys_, 0);
    read_queries_ = write_keys_ = read_keys_;
    decays_.assign(keys_, 0);
    for (std::int64_t x = 0; x < keys_; ++x) {
      const ChannelDecays<T> decays = channel_decays(start, rows, x);
      decays_[x] = decays.over(0, kBlocks);
      for (int i = 0; i < rows; ++i) {
        const int block = i / kBlock;
        const float k = key(start + i, x), q = query(start + i, x), e = erase_key(start + i, x),
                    from_start = decays.from_start(i);
        read_keys_[i * keys_ + x] = e * from_start * decays.over(0, block);
        read_queries_[i * keys_ + x] = q * from_start * decays.over(0, block);
        write_keys_[i * keys_ + x] = k * decays.to_end(i) * decays.over(block + 1, kBlocks);
        for (int j = 0; j <= i; ++j) {
          const int other = j / kBlock;
          const float k_j = key(start + j, x);
          if (other == block) {
            const float decayed = k_j * decays.between(j, i);
            kk[i][j] += e * decayed;
            qk[i][j] += q * decayed;
            continue;
          }
          const bool across = other < kMiddle && block >= kMiddle;
          const float row = from_start * (across ? decays.over(kMiddle, block) : 1);
          const float column = k_j * decays.to_end(j) * (across ? decays.over(other + 1, kMiddle) : 1);
          kk[i][j] += times(e * row, column);
          qk[i][j] += times(q * row, column);
        }
      }
    }
  }

  // t = (I + a)⁻¹ of `rows` rows, by blocks: those on the diagonal by forward substitution, T_ij = −T_ii
  // Σ_{j≤k<i} A_ik T_kj in TF32.
  static void invert(const Matrix& a, Matrix& t, int rows) {
    for (int j = 0; j < rows; ++j) {
      for (int i = j; i < (j / kBlock + 1) * kBlock; ++i) {
        float sum = i == j ? 1.0F : 0.0F;
        for (int x = j; x < i; ++x) sum -= a[i][x] * t[x][j];
        t[i][j] = sum;
      }
      for (int block = (j / kBlock + 1) * kBlock; block < rows; block += kBlock) {
        std::array<float, kBlock> sums{};
        for (int i = 0; i < kBlock; ++i) {
          for (int x = j / kBlock * kBlock; x < block; ++x)
            sums[i] += inverse_operand(a[block + i][x]) * inverse_operand(t[x][j]);
        }
        for (int i = 0; i < kBlock; ++i) {
          for (int x = 0; x <= i; ++x)
            t[block + i][j] -= inverse_operand(diagonal(a, block, i, x)) * inverse_operand(sums[x]);
        }
      }
    }
  }

  // Element (i, x) of the inverse of a diagonal block.
  static float diagonal(const Matrix& a, int block, int i, int x) {
    std::array<float, kBlock> column{};
    for (int r = x; r <= i; ++r) {
      column[r] = r == x ? 1.0F : 0.0F;
      for (int y = x; y < r; ++y) column[r] -= a[block + r][block + y] * column[y];
    }
    return column[i];
  }

  // Fills t_ with what blocks of kBlock tokens need for substitution: the inverses of the blocks of I + a on the
  // diagonal, and −a.
  void prepare_substitution(const Matrix& a) {
    for (int i = 0; i < kTokens; ++i) {
      for (int j = 0; j <= i; ++j) {
        const int first = i / kBlock * kBlock;
        t_[i][j] = j < first ? -a[i][j] : i == j ? 1.0F : 0.0F;
        for (int x = j; x < i && j >= first; ++x) t_[i][j] -= a[i][x] * t_[x][j];
      }
    }
  }

  // Returns U of R, or D of dU, of one value column.
  using Column = std::array<float, kTokens>;
  Column solve(Column r, int rows) const {
    Column u{};
    for (int i = 0; i < rows; ++i) {
      const int first = kSubstitutes ? i / kBlock * kBlock : 0;
      for (int j = 0; j < first; ++j) r[i] += times(t_[i][j], u[j]);
      for (int j = first; j <= i; ++j) u[i] += times(t_[i][j], r[j]);
    }
    return u;
  }
  Column solve_transposed(Column du, int rows) const {
    Column d{};
    for (int i = rows - 1; i >= 0; --i) {
      const int last = kSubstitutes ? std::min(rows, i / kBlock * kBlock + kBlock) : rows;
      for (int j = last; j < rows; ++j) du[i] += times(t_[j][i], d[j]);
      for (int j = i; j < last; ++j) d[i] += times(t_[j][i], du[j]);
    }
    return d;
  }

  void sweep(std::int64_t start, int rows, State& state, std::int64_t columns, bool values, bool outputs) {
    for (std::int64_t column = 0; column < columns; ++column) {
      Column residual{}, u{}, written{};
      for (int r = 0; r < rows; ++r) {
        float e = 0;
        for (std::int64_t i = 0; i < keys_; ++i)
          e += times(operand(state[i * columns + column]), read_keys_[r * keys_ + i]);
        const float v = values ? to_float(p_.v(at_.i_b, start + r, i_h_, column)) : 0.0F;
        residual[r] = operand(b_[r] * v - read_[r] * e);
      }
      const Column solved = solve(residual, rows);
      for (int i = 0; i < rows; ++i) {
        u[i] = operand(solved[i]);
        written[i] = operand(write_[i] * solved[i]);
      }
      for (int i = 0; i < rows && outputs; ++i) {
        float old = 0, sum = 0;
        for (std::int64_t x = 0; x < keys_; ++x)
          old += times(operand(state[x * columns + column]), read_queries_[i * keys_ + x]);
        for (int j = 0; j <= i; ++j) sum += times(p_matrix_[i][j], u[j]);
        p_.o(at_.i_b, start + i, i_h_, column) = from_state<T>(out_[i] * old + sum);
      }
      for (std::int64_t x = 0; x < keys_; ++x) {
        float sum = decays_[x] * state[x * columns + column];
        for (int i = 0; i < rows; ++i) sum += times(written[i], write_keys_[i * keys_ + x]);
        state[x * columns + column] = sum;
      }
    }
  }

  const DeltaForward<T>& p_;
  Sequence at_;
  std::int64_t n_, i_h_, i_q_, segments_, keys_, columns_;
  Matrix t_{}, p_matrix_{};
  // n_k, n_e (of erase keys) and n_q: the factors of the L2 norm, divided by the tokens' powers of two.
  std::array<float, kTokens> b_{}, read_{}, write_{}, out_{}, erase_{}, n_k_{}, n_e_{}, n_q_{}, key_unit_{},
      erase_unit_{}, query_unit_{};
  std::int64_t start_ = 0;             // of the chunk
  std::array<Log, kTokens> prefix_{};  // log γ
  float decay_ = 1;
  // What the sweep multiplies, with a gate per channel decayed from the chunk's start or to its end; γ_C per channel.
  std::vector<float> read_keys_, read_queries_, write_keys_, decays_;
};

// Runs the oracle on a problem in the host's memory, with sequences cut into segments.
template <class T>
void chunk_oracle_forward(const DeltaForward<T>& p, int segments = 1) {
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    for (std::int64_t i_h = 0; i_h < p.shape.value_heads; ++i_h) ChunkOracle<T>(p, n, i_h, segments).run();
  }
}

}  // namespace efla::test
