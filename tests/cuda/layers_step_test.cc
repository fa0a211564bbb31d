// Lists of products and mixer steps in one kernel on the GPU against the same operators one after the other.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "efla/base/random.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/layers/linear.h"
#include "efla/cuda/recurrent/layers_step.h"
#include "efla/cuda/recurrent/mixer_step.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

// A tensor on the device with random numbers.
template <class T, int Rank>
struct OnDevice {
  Tensor<T, Rank> host;
  DeviceTensor<T, Rank> device;

  OnDevice(const std::array<std::int64_t, Rank>& extent, Random& random, double factor = 1.0)
      : host(random_tensor<T, Rank>(extent, random, factor)), device(host) {}
  View<T, Rank> view() const { return device.view(); }
};

// Two layers of a small model with weights of type W, one token of `rows` texts.
template <class W>
class SmallModel {
 public:
  static constexpr std::int64_t kWidth = 136, kHeads = 3, kKeys = 40, kValues = 48, kInner = 1304, kTaps = 4;
  static constexpr std::int64_t kChannels = kHeads * (2 * kKeys + kValues), kColumns = kHeads * kValues;
  static constexpr std::int64_t kProjected = kChannels + 8 + kColumns;  // with b, a, two columns of nothing, and a gate

  explicit SmallModel(std::int64_t rows) : rows_(rows) {
    for (int i = 0; i < 2; ++i) layers_.push_back(std::make_unique<Layer>(rows, random_));
  }

  // Calls f(problem) for every operator of both layers, and for a head of many outputs.
  template <class F>
  void for_each(F&& f) {
    for (const auto& layer : layers_) {
      f(product(x_, layer->in, projected_, &layer->norm));
      f(step(*layer));
      f(product(o_, layer->out, x_, nullptr, &x_));
      auto gated = product(x_, layer->gate_up, inner_, &layer->norm);
      gated.swiglu = true;
      f(gated);
      f(product(inner_, layer->down, x_, nullptr, &x_));
    }
    f(product(x_, head_, logits_, nullptr));
  }
  std::vector<double> logits() {
    logits_.device.download();
    return logits_.host.values();
  }

 private:
  using Matrix = OnDevice<float, 2>;
  struct Layer {
    Layer(std::int64_t rows, Random& random)
        : in({kProjected, kWidth}, random, 0.1),
          out({kWidth, kColumns}, random, 0.1),
          gate_up({2 * kInner, kWidth}, random, 0.1),
          down({kWidth, kInner}, random, 0.03),
          taps({kChannels, kTaps}, random, 0.5),
          norm({kWidth}, random),
          o_norm({kValues}, random),
          beta_factor({kHeads}, random, 0.1),
          rate({kHeads}, random, 0.01),
          bias({kHeads}, random),
          history({rows, kTaps - 1, kChannels}, random),
          states({rows, kHeads, kKeys, kValues}, random, 0.3) {}
    OnDevice<W, 2> in, out, gate_up, down;
    Matrix taps;
    OnDevice<float, 1> norm, o_norm, beta_factor, rate, bias;
    OnDevice<float, 3> history;
    OnDevice<float, 4> states;
  };

  static LinearForward product(const Matrix& x, const OnDevice<W, 2>& weight, const Matrix& y,
                               const OnDevice<float, 1>* norm, const Matrix* residual = nullptr) {
    LinearForward p{x.view(), {}, y.view()};
    if constexpr (std::is_same_v<W, float>) {
      p.weight = weight.view();
    } else {
      p.narrow_weight = weight.view();
    }
    if (norm != nullptr) p.norm_weight = norm->view();
    p.norm_eps = 1e-5F;
    if (residual != nullptr) p.residual = residual->view();
    return p;
  }
  MixerStep step(const Layer& layer) const {
    const auto columns = [&](std::int64_t first, std::int64_t count) {
      View<const float, 2> view = projected_.view();
      view.data += first;
      view.extent[1] = count;
      return view;
    };
    MixerStep p;
    p.shape = {rows_, 1, kHeads, kHeads, kKeys, kValues};
    p.rule.step = parse_step_size("exact");
    p.rule.decay = Decay::scalar;
    p.rule.qk_l2norm = true;
    p.qkv = columns(0, kChannels);
    p.taps = layer.taps.view();
    p.beta = columns(kChannels, kHeads);
    p.beta_factor = layer.beta_factor.view();
    p.decay = columns(kChannels + kHeads, kHeads);
    p.rate = layer.rate.view();
    p.decay_bias = layer.bias.view();
    p.norm_weight = layer.o_norm.view();
    p.gate = columns(kChannels + 8, kColumns);
    p.history = layer.history.view();
    p.states = layer.states.view();
    p.o = o_.view();
    return p;
  }

  std::int64_t rows_;
  Random random_{7};
  Matrix x_{{rows_, kWidth}, random_}, projected_{{rows_, kProjected}, random_}, o_{{rows_, kColumns}, random_},
      inner_{{rows_, kInner}, random_}, logits_{{rows_, 20000}, random_};
  OnDevice<W, 2> head_{{20000, kWidth}, random_, 0.1};
  std::vector<std::unique_ptr<Layer>> layers_;
};

template <class W>
void check_layers_step(std::int64_t rows) {
  SCOPED_TRACE(testing::Message() << DTypeOf<W>::name << ' ' << rows << " rows");
  SmallModel<W> one_by_one(rows), together(rows);
  gpu::LayersStep step;
  together.for_each([&](const auto& problem) {
    ASSERT_TRUE(gpu::LayersStep::takes(problem));
    step.add(problem);
  });
  const DeviceBytes memory(step.bytes());
  gpu::check(cudaMemcpy(memory.data(), step.image(memory.data()).data(), memory.bytes(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
  for (int token = 0; token < 3; ++token) {
    one_by_one.for_each([](const auto& problem) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(problem)>, LinearForward>) {
        gpu::linear(problem, nullptr);
      } else {
        gpu::mixer_step(problem, nullptr);
      }
    });
    step.run(memory.data(), nullptr);
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    EXPECT_LE(distance(together.logits(), one_by_one.logits()).rms, tolerance_of("float32").cap) << "token " << token;
  }
}

class CudaLayersStep : public testing::Test {
 protected:
  void SetUp() override {
    const auto reason = why_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    if (!gpu::is_hopper()) GTEST_SKIP() << "it needs a Hopper GPU";
  }
};

TEST_F(CudaLayersStep, IsItsOperatorsOneAfterTheOther) {
  for (const std::int64_t rows : {1, 2, 4}) {
    check_layers_step<float>(rows);
    check_layers_step<bfloat16>(rows);
  }
}

}  // namespace
}  // namespace efla::test
