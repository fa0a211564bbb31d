// A layer of the language model, the classifier and the model of the synthetic tasks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer.h"
#include "efla/nn/layers/mlp.h"
#include "efla/nn/layers/parameters.h"
#include "efla/nn/layers/rwkv7_mixer.h"
#include "efla/nn/layers/softmax_mixer.h"

namespace efla::nn {

// The residual stream x + branch [B, T, D]; the next norm adds the branch. An undefined branch counts as zeros.
struct Stream {
  torch::Tensor x, branch;
  torch::Tensor first_values = {};  // of the first layer, which layers of rwkv7 read
};

// Returns {x + branch, its RMS norm}.
std::pair<torch::Tensor, torch::Tensor> add_and_norm(const Stream& stream, const Weight& weight, double eps);

struct BlockConfig {
  std::variant<MixerConfig, AttentionConfig> mixer = {};
  std::string mixer_name = "mixer";  // of the mixer's module; the norm before it is named MIXER_NAME_norm
  std::int64_t mlp_width = 0;        // inner width of the MLP; 0: no MLP and no norm before it
  double norm_eps = 1e-6;
};

// Computes x += mixer(norm(x)), x += mlp(norm(x)). Norms are RMS norms.
class Block : public torch::nn::Module {
 public:
  // Throws Error for a configuration that the mixer refuses.
  Block(const BlockConfig& config, const Initialiser& init);

  // Several threads may call this function at once. cu_seqlens is as in Mixer.
  Stream forward(const Stream& in, const torch::Tensor& cu_seqlens = {}) const;
  // Does the same with `mix` instead of the mixer's forward: with a forward of the mixer that has a state.
  Stream forward(const Stream& in, const std::function<torch::Tensor(const torch::Tensor&)>& mix) const;
  // Returns whether the mixer waits for a GPU to read cu_seqlens on the CPU.
  bool waits_for_gpu() const;

  std::variant<std::shared_ptr<Mixer>, std::shared_ptr<SoftmaxMixer>, std::shared_ptr<Attention>,
               std::shared_ptr<Rwkv7Mixer>>
      mixer;

 private:
  double norm_eps_;
  std::shared_ptr<Weight> mixer_norm_, mlp_norm_;
  std::shared_ptr<Mlp> mlp_;
};

}  // namespace efla::nn
