// The chunkwise backward of the CUDA kernels in float32 on the CPU, with rounding at exactly the kernels' points. What
// differs from a kernel is the order of sums.
//
// bfloat16 and float16 inputs (efla/cuda/chunk/chunk_bwd.h): the points of the kernels for Hopper, in their type:
// besides the forward's, U and D and their gradients as operands, dS' as an operand, the scaled dO and D that change
// dS, and W and H with all their factors. With a gate per channel or two keys
// (efla/cuda/chunk/grads/grads_channel_sm90.cu) the decayed keys and queries of blocks of 16 tokens are rounded too,
// but not W and H of pairs within a block. The portable kernel without such a gate rounds W and H twice, with one
// factor of the L2 norm each. The kernels of float32 operands round as in the forward (chunk_oracle.h); with a gate per
// channel the products of W and H with decayed keys and queries, of blocks of 8 tokens, are in float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/chunk_oracle.h"

namespace efla::test {

// One value head of one sequence.
template <class T>
class ChunkBwdOracle : ChunkOracle<T> {
  using Base = ChunkOracle<T>;
  using Base::at_, Base::b_, Base::channel_decays, Base::columns_, Base::decay_, Base::decay_of, Base::decays_,
      Base::decays_rows, Base::erase_, Base::erase_key, Base::i_h_, Base::i_q_, Base::kBlock, Base::kBlocks, Base::key,
      Base::keys_, Base::kTokens, Base::n_, Base::n_e_, Base::n_k_, Base::n_q_, Base::operand, Base::out_, Base::p_,
      Base::p_matrix_, Base::prefix_, Base::prepare, Base::query, Base::read_, Base::read_keys_, Base::read_queries_,
      Base::solve, Base::solve_transposed, Base::times, Base::write_, Base::write_keys_;
  using typename Base::Column, typename Base::Matrix, typename Base::State;

 public:
  ChunkBwdOracle(const DeltaForward<T>& forward, const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h)
      : Base(forward, n, i_h, 1), bwd_(p) {}

  // Writes the gradients of the value head's own inputs, and adds to the gradients of q̂, k̂ and with two keys κ̂ [T, K].
  void run(std::vector<float>& dq, std::vector<float>& dk, std::vector<float>& derase_key) {
    State s(keys_ * columns_);
    for (std::int64_t i = 0; i < keys_ * columns_ && p_.initial_state; ++i) {
      s[i] = p_.initial_state(n_, i_h_, i / columns_, i % columns_);
    }
    std::vector<Chunk> chunks;
    for (std::int64_t start = at_.begin; start < at_.end; start += kTokens) chunks.push_back(advance(start, s));
    State ds(keys_ * columns_);
    for (std::int64_t i = 0; i < keys_ * columns_ && bwd_.dfinal_state; ++i) {
      ds[i] = bwd_.dfinal_state(n_, i_h_, i / columns_, i % columns_);
    }
    for (std::int64_t c = std::ssize(chunks) - 1; c >= 0; --c) {
      const std::int64_t start = at_.begin + c * kTokens;
      const int rows = static_cast<int>(std::min<std::int64_t>(kTokens, at_.end - start));
      prepare(start, rows);
      retreat(start, rows, chunks[c], ds);
      if (decays_rows()) {
        channel_gradients(start, rows, chunks[c], dq, dk, derase_key);
      } else {
        gradients(start, rows, chunks[c], dq, dk);
      }
    }
    for (std::int64_t i = 0; i < keys_ * columns_ && bwd_.dinitial_state; ++i) {
      bwd_.dinitial_state(n_, i_h_, i / columns_, i % columns_) = ds[i];
    }
  }

 private:
  // What the kernels hand over, rounded: S before the chunk and dS' [K, V], U and D [tokens, V].
  struct Chunk {
    State s, ds, u, d;
  };

  static State rounded_state(const State& s) {
    State result;
    for (const float x : s) result.push_back(operand(x));
    return result;
  }
  float dout(std::int64_t t, std::int64_t j) const { return to_float(bwd_.dout(at_.i_b, t, i_h_, j)); }

  Chunk advance(std::int64_t start, State& s) {
    const int rows = static_cast<int>(std::min<std::int64_t>(kTokens, at_.end - start));
    prepare(start, rows);
    Chunk c{rounded_state(s), {}, State(rows * columns_), State(rows * columns_)};
    for (std::int64_t j = 0; j < columns_; ++j) {
      Column residual{}, written{};
      for (int r = 0; r < rows; ++r) {
        float e = 0;
        for (std::int64_t x = 0; x < keys_; ++x) e += times(c.s[x * columns_ + j], read_keys_[r * keys_ + x]);
        residual[r] = operand(b_[r] * to_float(p_.v(at_.i_b, start + r, i_h_, j)) - read_[r] * e);
      }
      const Column solved = solve(residual, rows);
      for (int i = 0; i < rows; ++i) {
        c.u[i * columns_ + j] = operand(solved[i]);
        written[i] = operand(write_[i] * solved[i]);
      }
      for (std::int64_t x = 0; x < keys_; ++x) {
        float sum = decays_[x] * s[x * columns_ + j];
        for (int i = 0; i < rows; ++i) sum += times(written[i], write_keys_[i * keys_ + x]);
        s[x * columns_ + j] = sum;
      }
    }
    return c;
  }

  void retreat(std::int64_t start, int rows, Chunk& c, State& ds) const {
    c.ds = rounded_state(ds);
    for (std::int64_t j = 0; j < columns_; ++j) {
      Column du{}, written{};
      for (int i = 0; i < rows; ++i) {
        float sum = 0;
        for (std::int64_t x = 0; x < keys_; ++x) sum += times(c.ds[x * columns_ + j], write_keys_[i * keys_ + x]);
        sum *= write_[i];
        for (int r = i; r < rows; ++r) sum += times(p_matrix_[r][i], dout(start + r, j));
        du[i] = operand(sum);
      }
      const Column d = solve_transposed(du, rows);
      for (int i = 0; i < rows; ++i) {
        c.d[i * columns_ + j] = operand(d[i]);
        written[i] = operand(out_[i] * dout(start + i, j));
      }
      for (std::int64_t x = 0; x < keys_; ++x) {
        float sum = decays_[x] * ds[x * columns_ + j];
        for (int i = 0; i < rows; ++i) {
          sum += times(written[i], read_queries_[i * keys_ + x]) -
                 times(operand(read_[i] * d[i]), read_keys_[i * keys_ + x]);
        }
        ds[x * columns_ + j] = sum;
      }
    }
  }

  // Σ_j of two rows of matrices of V columns.
  float product(const State& x, std::int64_t i, const State& y, std::int64_t r) const {
    float sum = 0;
    for (std::int64_t j = 0; j < columns_; ++j) sum += times(x[i * columns_ + j], y[r * columns_ + j]);
    return sum;
  }

  void gradients(std::int64_t start, int rows, const Chunk& c, std::vector<float>& dq_sum, std::vector<float>& dk_sum) {
    const auto scale = static_cast<float>(p_.rule.scale_for(keys_));
    State of_dout;
    for (int i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns_; ++j) of_dout.push_back(dout(start + i, j));
    }
    Matrix w_rounded{}, h_rounded{}, m{};  // with the factors of the L2 norm, and h_rounded with −a
    std::array<float, kTokens> key_key{};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j <= i; ++j) {
        const float decay = decay_of(prefix_[i] - prefix_[j]);
        const float w = scale * decay * product(of_dout, i, c.u, j);
        const float h = j < i ? decay * product(c.d, i, c.u, j) : 0.0F;
        float qk = 0, kk = 0;
        for (std::int64_t x = 0; x < keys_; ++x) {
          qk += times(query(start + i, x), key(start + j, x));
          kk += times(key(start + i, x), key(start + j, x));
        }
        w_rounded[i][j] = operand(w * n_q_[i] * n_k_[j]);
        h_rounded[i][j] = operand(-erase_[i] * n_k_[i] * n_k_[j] * h);
        key_key[i] += n_k_[i] * n_k_[j] * h * kk;
        m[i][j] = n_k_[j] * (w * n_q_[i] * qk - erase_[i] * n_k_[i] * h * kk);
      }
    }
    std::array<float, kTokens> read{}, written{};
    for (int i = 0; i < rows; ++i) {
      const std::int64_t t = start + i;
      float da = 0, db = 0;
      std::vector<float> dk(keys_);
      const float gamma = decay_of(prefix_[i]), suffix = write_[i] / n_k_[i];
      for (std::int64_t x = 0; x < keys_; ++x) {
        float dq = scale * gamma * product(of_dout, i, c.s, x), erase = gamma * product(c.d, i, c.s, x);
        float y = suffix * product(c.u, i, c.ds, x);
        read[i] += n_q_[i] * query(t, x) * dq - erase_[i] * n_k_[i] * key(t, x) * erase;
        written[i] += n_k_[i] * key(t, x) * y;
        da -= n_k_[i] * key(t, x) * erase;
        y -= erase_[i] * erase;
        float of_queries = 0, of_keys = 0;
        for (int j = 0; j <= i; ++j) {
          of_queries += times(w_rounded[i][j], key(start + j, x));
          of_keys += times(h_rounded[i][j], key(start + j, x));
        }
        for (int r = i; r < rows; ++r) {
          of_keys += times(w_rounded[r][i], query(start + r, x)) + times(h_rounded[r][i], key(start + r, x));
        }
        dq_sum[t * keys_ + x] += dq + of_queries / n_q_[i];
        dk[x] = y + of_keys / n_k_[i];
      }
      da -= key_key[i];
      for (std::int64_t j = 0; j < columns_; ++j) {
        db += to_float(p_.v(at_.i_b, t, i_h_, j)) * c.d[i * columns_ + j];
        bwd_.dv(at_.i_b, t, i_h_, j) = from_state<T>(b_[i] * c.d[i * columns_ + j]);
      }
      finish_token(t, i, da, db, dk, dk_sum);
    }
    if (!bwd_.g) return;
    float z = 0;
    for (std::int64_t i = 0; i < keys_ * columns_; ++i) z += c.s[i] * c.ds[i];
    for (int t = 0; t < rows; ++t) {
      float dg = decay_ * z;
      for (int i = t; i < rows; ++i) dg += read[i];
      for (int j = 0; j < t; ++j) dg += written[j];
      for (int i = t; i < rows; ++i) {
        for (int j = 0; j < t; ++j) dg += m[i][j];
      }
      bwd_.dg(at_.i_b, start + t, i_h_, 0) = dg;
    }
  }

  // What a chunk has per channel, with the factors of the L2 norm.
  struct Channel {
    ChannelDecays<T> decays;
    std::array<float, kTokens> k{}, q{}, erase_key{};
    std::array<float, kTokens> decayed_key{}, decayed_query{}, decayed_erase{};  // rounded
    std::array<float, kTokens> of_query{}, of_erase{},
        of_key{};                        // what S and other blocks give, from the block's start or to its end
    std::array<float, kBlocks> cross{};  // the sum of what spans all of a block
  };

  void channel_gradients(std::int64_t start, int rows, const Chunk& c, std::vector<float>& dq_sum,
                         std::vector<float>& dk_sum, std::vector<float>& derase_sum) {
    State of_dout;
    for (int i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns_; ++j) of_dout.push_back(dout(start + i, j));
    }
    Matrix w{}, h{};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j <= i; ++j) {
        w[i][j] = out_[i] * n_k_[j] * product(of_dout, i, c.u, j);
        if (j < i) h[i][j] = n_e_[i] * n_k_[j] * product(c.d, i, c.u, j);
        if (i / kBlock == j / kBlock) continue;
        w[i][j] = operand(w[i][j]);
        h[i][j] = operand(h[i][j]);
      }
    }
    std::array<float, kTokens> da{}, dg_of_head{};
    std::vector<float> dk(rows * keys_);
    for (std::int64_t x = 0; x < keys_; ++x) {
      const Channel channel = other_blocks(start, rows, x, c, of_dout, w, h);
      std::array<float, kTokens> dg{}, key_gradient{}, erase{};
      for (int i = 0; i < rows; ++i) key_gradient[i] = channel.decays.to_end(i) * channel.of_key[i];
      float written = 0;
      for (int i = 0; i < rows; ++i) {
        if (i % kBlock == 0) written = 0;
        dg[i] += channel.cross[i / kBlock] + written;
        written += channel.k[i] * key_gradient[i];
      }
      for (int i = 0; i < rows; ++i) {
        const int first = i / kBlock * kBlock;
        const float from_start = channel.decays.from_start(i), erasing = erase_[i] * channel.erase_key[i];
        float dq = from_start * channel.of_query[i], spanning = 0;
        erase[i] = from_start * channel.of_erase[i];
        const float read = channel.q[i] * dq - erasing * erase[i];
        for (int t = first; t <= i; ++t) dg[t] += read;
        for (int j = first; j <= i; ++j) {
          const float decay = channel.decays.between(j, i);
          dq += w[i][j] * decay * channel.k[j];
          erase[i] += h[i][j] * decay * channel.k[j];
          const float to_key = decay * (w[i][j] * channel.q[i] - h[i][j] * erasing);
          key_gradient[j] += to_key;
          spanning += channel.k[j] * to_key;
          if (j < i) dg[j + 1] += spanning;
        }
        dq_sum[(start + i) * keys_ + x] += dq / n_q_[i];
        da[i] -= channel.erase_key[i] * erase[i];
      }
      for (int i = 0; i < rows; ++i) {
        const float of_erase = -erase_[i] * erase[i];
        dk[i * keys_ + x] = (key_gradient[i] + (p_.rule.two_keys ? 0 : of_erase)) / n_k_[i];
        if (p_.rule.two_keys) derase_sum[(start + i) * keys_ + x] += of_erase / n_e_[i];
        if (p_.rule.decay == Decay::channel) bwd_.dg(at_.i_b, start + i, i_h_, x) = dg[i];
        dg_of_head[i] += dg[i];
      }
    }
    for (int i = 0; i < rows && p_.rule.decay == Decay::scalar; ++i)
      bwd_.dg(at_.i_b, start + i, i_h_, 0) = dg_of_head[i];
    for (int i = 0; i < rows; ++i) {
      float db = 0;
      for (std::int64_t j = 0; j < columns_; ++j) {
        db += to_float(p_.v(at_.i_b, start + i, i_h_, j)) * c.d[i * columns_ + j];
        bwd_.dv(at_.i_b, start + i, i_h_, j) = from_state<T>(b_[i] * c.d[i * columns_ + j]);
      }
      finish_token(start + i, i, da[i], db, {dk.begin() + i * keys_, dk.begin() + (i + 1) * keys_}, dk_sum,
                   &derase_sum);
    }
  }

  // Fills what the states and other blocks give to the tokens of a block: of the blocks before it by a recurrence from
  // the chunk's start over blocks, of those after it by one from the chunk's end.
  Channel other_blocks(std::int64_t start, int rows, std::int64_t x, const Chunk& c, const State& of_dout,
                       const Matrix& w, const Matrix& h) {
    Channel channel{channel_decays(start, rows, x)};
    for (int i = 0; i < rows; ++i) {
      channel.k[i] = key(start + i, x);
      channel.q[i] = query(start + i, x);
      channel.erase_key[i] = erase_key(start + i, x);
      const float from_start = channel.decays.from_start(i);
      channel.decayed_key[i] = operand(channel.k[i] * channel.decays.to_end(i));
      channel.decayed_query[i] = operand(channel.q[i] * from_start);
      channel.decayed_erase[i] = operand(-erase_[i] * channel.erase_key[i] * from_start);
      channel.of_query[i] = out_[i] * product(of_dout, i, c.s, x);
      channel.of_erase[i] = n_e_[i] * product(c.d, i, c.s, x);
      channel.of_key[i] = n_k_[i] * product(c.u, i, c.ds, x);
    }
    const float z = channel.decays.over(0, kBlocks) * product(c.s, x, c.ds, x);
    for (float& cross : channel.cross) cross = z;
    for (int j = 0; j < rows; ++j) {
      const int block = j / kBlock;
      const float written = channel.decays.over(block + 1, kBlocks) * channel.decayed_key[j] * channel.of_key[j];
      for (int other = block + 1; other < kBlocks; ++other) channel.cross[other] += written;
      for (int other = kBlocks - 1; other > block; --other) {
        channel.of_key[j] *= channel.decays.over(other);
        for (int i = kBlock * other; i < std::min(kBlock * (other + 1), rows); ++i)
          channel.of_key[j] += w[i][j] * channel.decayed_query[i] + h[i][j] * channel.decayed_erase[i];
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int other = 0; other < i / kBlock; ++other) {
        channel.cross[other] +=
            channel.decays.over(other, i / kBlock) *
            (channel.decayed_query[i] * channel.of_query[i] + channel.decayed_erase[i] * channel.of_erase[i]);
        channel.of_query[i] *= channel.decays.over(other);
        channel.of_erase[i] *= channel.decays.over(other);
        for (int j = kBlock * other; j < kBlock * (other + 1); ++j) {
          channel.of_query[i] += w[i][j] * channel.decayed_key[j];
          channel.of_erase[i] += h[i][j] * channel.decayed_key[j];
        }
      }
    }
    return channel;
  }

  // Writes dbeta, and adds the gradient of k̂ with what comes through λ, or of k̂ and κ̂ with what comes through μ.
  void finish_token(std::int64_t t, int i, float da, float db, const std::vector<float>& dk, std::vector<float>& dk_sum,
                    std::vector<float>* derase_sum = nullptr) const {
    const auto& step = p_.rule.step;
    float lambda = 0;
    for (std::int64_t x = 0; x < keys_; ++x) lambda += erase_key(t, x) * key(t, x);
    lambda *= n_e_[i] * n_k_[i];
    const float beta = to_float(p_.beta(at_.i_b, t, i_h_));
    const Gain<float> of_token = p_.rule.two_keys ? two_key_gain(step, beta, lambda) : gain(step, beta, lambda);
    const float dalpha = static_cast<float>(step.erase_scale) * da + static_cast<float>(step.write_scale) * db;
    bwd_.dbeta(at_.i_b, t, i_h_) =
        from_state<T>(dalpha * of_token.beta_unit * of_token.beta_slope * of_token.beta_unit);
    const float twice_dlambda = 2 * dalpha * of_token.lambda_slope * of_token.lambda_unit;
    for (std::int64_t x = 0; x < keys_; ++x) {
      const float of_key = of_token.lambda_unit * n_k_[i] * key(t, x);
      if (!p_.rule.two_keys) {
        dk_sum[t * keys_ + x] += dk[x] + twice_dlambda * of_key;
        continue;
      }
      dk_sum[t * keys_ + x] += dk[x] + twice_dlambda / 2 * (of_token.lambda_unit * n_e_[i] * erase_key(t, x));
      (*derase_sum)[t * keys_ + x] += twice_dlambda / 2 * of_key;
    }
  }

  const DeltaBackward<T>& bwd_;
};

// Runs the oracle on a problem in the host's memory; `forward` has the same inputs and the initial state.
template <class T>
void chunk_oracle_backward(const DeltaForward<T>& forward, const DeltaBackward<T>& p) {
  const std::int64_t keys = p.shape.key_dim, group = p.shape.group();
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    const Sequence at = sequence_of(p, n);
    for (std::int64_t i_q = 0; i_q < p.shape.heads; ++i_q) {
      std::vector<float> dq(p.shape.tokens * keys), dk = dq, derase_key = dq;
      for (std::int64_t i_h = i_q * group; i_h < (i_q + 1) * group; ++i_h)
        ChunkBwdOracle<T>(forward, p, n, i_h).run(dq, dk, derase_key);
      // The factor of k multiplies κ too, so that κ̂·dκ̂ (`other`) is a part of what the norm of k takes away.
      const auto store = [&](const std::vector<float>& gradient, const View<const T, 4>& x, const View<T, 4>& to,
                             std::int64_t t, float other) {
        float squares = 0, along = p.rule.qk_l2norm ? other : 0.0F;
        for (std::int64_t i = 0; i < keys; ++i)
          squares += to_float(x(at.i_b, t, i_q, i)) * to_float(x(at.i_b, t, i_q, i));
        const float factor = p.rule.qk_l2norm ? 1 / std::sqrt(squares + static_cast<float>(kL2NormEpsilon)) : 1.0F;
        for (std::int64_t i = 0; i < keys && p.rule.qk_l2norm; ++i) {
          along += factor * to_float(x(at.i_b, t, i_q, i)) * gradient[t * keys + i];
        }
        for (std::int64_t i = 0; i < keys; ++i) {
          to(at.i_b, t, i_q, i) =
              from_state<T>(factor * (gradient[t * keys + i] - along * factor * to_float(x(at.i_b, t, i_q, i))));
        }
        return factor;
      };
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        store(dq, p.q, p.dq, t, 0);
        float product = 0, squares = 0;
        for (std::int64_t i = 0; i < keys && p.rule.two_keys; ++i) {
          product += to_float(p.erase_key(at.i_b, t, i_q, i)) * derase_key[t * keys + i];
          squares += to_float(p.k(at.i_b, t, i_q, i)) * to_float(p.k(at.i_b, t, i_q, i));
        }
        const float norm = p.rule.qk_l2norm ? 1 / std::sqrt(squares + static_cast<float>(kL2NormEpsilon)) : 1.0F;
        const float factor = store(dk, p.k, p.dk, t, norm * product);
        for (std::int64_t i = 0; i < keys && p.rule.two_keys; ++i)
          p.derase_key(at.i_b, t, i_q, i) = from_state<T>(factor * derase_key[t * keys + i]);
      }
    }
  }
}

}  // namespace efla::test
