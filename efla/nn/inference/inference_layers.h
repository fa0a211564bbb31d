// Types and functions that the files of InferenceModel share.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/ops/layers/rms_norm.h"

namespace efla::nn {

using Vector = std::vector<float>;

inline View<float, 2> columns_of(View<float, 2> view, const Columns& columns) {
  view.data += columns.first;
  view.extent[1] = columns.count;
  return view;
}

inline void norm(const View<float, 2>& x, const Vector& weight, double eps, const View<float, 2>& y, ThreadPool& pool) {
  RmsNormForward<float> p;
  p.x = x;
  p.weight = View<const float, 1>::contiguous(weight.data(), {static_cast<std::int64_t>(weight.size())});
  p.eps = static_cast<float>(eps);
  p.y = y;
  rms_norm_forward(p, {.context = {.pool = &pool}});
}

struct InferenceModel::Layer {
  Vector attn_norm, mlp_norm, o_norm, taps;
  Vector beta_factor;    // [HV]: beta_scale · softplus(α)
  Vector rate, dt_bias;  // of the decay, by autograd::decay_rate: [HV]; [HV] or [HV·K]
  Vector gate_bias;      // of the sigmoid gate [HV·V]
  PackedWeight in;       // of MixerPlan::projections
  PackedWeight f_out, g_out, o_proj, gate_up, down;
};

// The results of the layers of one call, one row per token.
struct InferenceModel::Buffers {
  // A matrix whose memory only grows, with undefined elements. It is aligned to a cache line, because a load across two
  // lines takes longer.
  class Buffer {
   public:
    View<float, 2> rows(std::int64_t count, std::int64_t columns) {
      const auto size = static_cast<std::size_t>(count * columns);
      if (size > size_) {
        data_.reset(new (kCacheLine) float[size]);
        size_ = size;  // last: without memory the old size stays true
      }
      return View<float, 2>::contiguous(data_.get(), {count, columns});
    }
    float* data() const { return data_.get(); }

   private:
    static constexpr std::align_val_t kCacheLine{64};
    struct Free {
      void operator()(float* p) const { ::operator delete[](p, kCacheLine); }
    };
    std::size_t size_ = 0;
    std::unique_ptr<float[], Free> data_;
  };

  std::int64_t rows = 0, decodes = 0;    // decodes: runs of one token
  std::vector<Draft>* drafts = nullptr;  // the caller's list
  Buffer x, normed, projected, window, mixed, beta, decay, o, gate, inner, product, final_state;
};

}  // namespace efla::nn
