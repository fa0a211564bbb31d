// Times the layers of a decode step of a model with 374 million parameters, with weights in bfloat16: all operators, or
// one kind of operator in every layer.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/layers/linear.h"
#include "efla/cuda/recurrent/mixer_step.h"

namespace efla::bench::cuda {
namespace {

constexpr std::int64_t kLayers = 24, kHidden = 1024, kModelHeads = 8, kDim = 128, kInner = 2816, kVocabulary = 32000;
constexpr std::int64_t kTaps = 4, kChannels = 3 * kHidden, kProjected = kChannels + kModelHeads;  // kModelHeads: of β
constexpr std::int64_t kState = kModelHeads * kDim * kDim;
constexpr double kMaxStepError = 1e-4;  // between a text's outputs with different numbers of other texts

using Operator = std::variant<LinearForward, MixerStep>;

// Several copies of the same random numbers on the device, one after another.
template <class T>
class Copies {
 public:
  Copies(std::int64_t size, float factor, std::uint64_t stream, int count = kLayers)
      : values_(scaled(size, factor, stream)), memory_(count * bytes()), count_(count) {
    reset();
  }
  void reset() const {
    for (int i = 0; i < count_; ++i) {
      check(cudaMemcpy(at(i), values_.device, bytes(), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    }
  }
  T* at(int i) const { return static_cast<T*>(memory_.data()) + i * values_.host.size(); }

 private:
  static std::vector<T> scaled(std::int64_t size, float factor, std::uint64_t stream) {
    auto values = random_values<T>(size, stream);
    for (auto& value : values) value = from_state<T>(to_float(value) * factor);
    return values;
  }
  std::size_t bytes() const { return values_.host.size() * sizeof(T); }

  Both<T> values_;
  DeviceMemory memory_;
  int count_;
};

// The weights of a model, and the states and activations of several texts.
class Model {
 public:
  explicit Model(std::int64_t texts)
      : states_(texts * kState, 0.3F, 11),
        history_(texts * (kTaps - 1) * kChannels, 1, 12),
        x_(texts * kHidden, 1, 13, 1),
        projected_(texts * kProjected, 1, 14, 1),
        o_(texts * kHidden, 1, 15, 1),
        inner_(texts * kInner, 1, 16, 1),
        logits_(texts * kVocabulary, 1, 17, 1) {}

  // Returns the operators of a part of the step (in, mixer, out, gate_up, down, head, chain or all) for the first
  // texts.
  std::vector<Operator> operators(const std::string& part, std::int64_t texts) const {
    std::vector<Operator> list;
    const auto add = [&](const char* name, const Operator& one) {
      if (part == name || (part == "all" && std::string(name) != "chain")) list.push_back(one);
    };
    for (int i = 0; i < kLayers; ++i) {
      const bool odd = i % 2 != 0;
      add("in", product(texts, x_, in_.at(i), kHidden, projected_, kProjected, true));
      add("mixer", mixer(texts, i));
      add("out", product(texts, o_, out_.at(i), kHidden, x_, kHidden, false));
      add("gate_up", product(texts, x_, gate_up_.at(i), kHidden, inner_, kInner, true, true));
      add("down", product(texts, inner_, down_.at(i), kInner, x_, kHidden, false));
      // Each of these products reads what the previous one wrote.
      add("chain", product(texts, odd ? o_ : x_, out_.at(i), kHidden, odd ? x_ : o_, kHidden, true));
    }
    if (part == "all" || part == "head") {
      list.emplace_back(product(texts, x_, head_.at(0), kHidden, logits_, kVocabulary, true));
    }
    return list;
  }
  void reset() const {
    for (const auto* copies : {&states_, &history_, &x_, &projected_, &o_, &inner_}) copies->reset();
  }

 private:
  // Without a norm the product is added to y.
  LinearForward product(std::int64_t texts, const Copies<float>& x, const bfloat16* weight, std::int64_t columns,
                        const Copies<float>& y, std::int64_t outputs, bool norm, bool swiglu = false) const {
    LinearForward p;
    p.x = View<const float, 2>::contiguous(x.at(0), {texts, columns});
    p.narrow_weight = View<const bfloat16, 2>::contiguous(weight, {swiglu ? 2 * outputs : outputs, columns});
    p.y = View<float, 2>::contiguous(y.at(0), {texts, outputs});
    p.swiglu = swiglu;
    p.norm_eps = 1e-6F;
    if (norm) {
      p.norm_weight = View<const float, 1>::contiguous(norm_.at(0), {columns});
    } else {
      p.residual = p.y;
    }
    return p;
  }
  MixerStep mixer(std::int64_t texts, int layer) const {
    const auto columns = [&](std::int64_t first, std::int64_t count) {
      return View<const float, 2>{projected_.at(0) + first, {texts, count}, {kProjected, 1}};
    };
    MixerStep p;
    p.shape = {texts, 1, kModelHeads, kModelHeads, kDim, kDim};
    p.rule.step = parse_step_size("exact");
    p.qkv = columns(0, kChannels);
    p.taps = View<const float, 2>::contiguous(taps_.at(0), {kChannels, kTaps});
    p.beta = columns(kChannels, kModelHeads);
    p.beta_activation = BetaActivation::softplus;
    p.beta_factor = View<const float, 1>::contiguous(ones_.device, {kModelHeads});
    p.norm_weight = View<const float, 1>::contiguous(norm_.at(0), {kDim});
    p.history = View<float, 3>::contiguous(history_.at(layer), {texts, kTaps - 1, kChannels});
    p.states = View<float, 4>::contiguous(states_.at(layer), {texts, kModelHeads, kDim, kDim});
    p.o = View<float, 2>::contiguous(o_.at(0), {texts, kModelHeads * kDim});
    return p;
  }

  Copies<bfloat16> in_{kProjected * kHidden, 0.03F, 1}, out_{kHidden * kHidden, 0.03F, 2},
      gate_up_{2 * kInner * kHidden, 0.03F, 3}, down_{kHidden * kInner, 0.02F, 4},
      head_{kVocabulary * kHidden, 0.03F, 5, 1};
  Copies<float> norm_{kHidden, 1, 6, 1}, taps_{kChannels * kTaps, 0.5F, 7, 1};
  Both<float> ones_{std::vector<float>(kModelHeads, 1.0F)};  // a negative β would let states grow
  Copies<float> states_, history_, x_, projected_, o_, inner_, logits_;
};

void run_operators(const std::vector<Operator>& operators, cudaStream_t stream) {
  for (const Operator& one : operators) {
    if (const auto* mixer = std::get_if<MixerStep>(&one)) {
      gpu::mixer_step(*mixer, stream);
    } else {
      gpu::linear(std::get<LinearForward>(one), stream);
    }
  }
}

// Runs all operators once and returns what the last one writes for the first text.
std::vector<float> output_of(const std::vector<Operator>& operators) {
  const auto* mixer = std::get_if<MixerStep>(&operators.back());
  const View<float, 2> y = mixer != nullptr ? mixer->o : std::get<LinearForward>(operators.back()).y;
  run_operators(operators, nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<float> values(y.extent[1]);
  check(cudaMemcpy(values.data(), y.data, values.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

// Returns the bytes of the weights that operators read, and of the states that they read and write.
std::int64_t bytes_of(const std::vector<Operator>& operators) {
  std::int64_t bytes = 0;
  for (const Operator& one : operators) {
    const auto* mixer = std::get_if<MixerStep>(&one);
    bytes += mixer != nullptr ? mixer->states.size() * 8 : std::get<LinearForward>(one).narrow_weight.size() * 2;
  }
  return bytes;
}

}  // namespace

void time_layers(CaseRun& run, const std::string& name, const std::string& part, std::int64_t texts) {
  constexpr std::int64_t kOther = 8;  // texts with which mixer_step uses its kernel for many heads
  const Model model(std::max(texts, kOther));
  const auto operators = model.operators(part, texts);
  const std::vector<float> y = output_of(operators);
  model.reset();
  const std::vector<float> other = output_of(model.operators(part, texts == 1 ? kOther : 1));
  double error = 0, size = 0;  // sums over the first text's outputs
  for (std::size_t i = 0; i < y.size(); ++i) {
    error += (y[i] - other[i]) * (y[i] - other[i]);
    size += other[i] * other[i];
  }
  error = std::sqrt(error / size);
  run.write_result(
      name,
      "\"op\": \"step\", \"part\": \"" + part + "\", \"texts\": " + std::to_string(texts) +
          ", \"bytes\": " + std::to_string(bytes_of(operators)) + ", \"error\": " + error_json(error),
      error <= kMaxStepError,
      [&] { return time_calls(run.options.repeats, [&](cudaStream_t stream) { run_operators(operators, stream); }); });
}

}  // namespace efla::bench::cuda
