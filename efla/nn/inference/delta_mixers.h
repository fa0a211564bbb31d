// The mixers of a model's layers for inference on the CPU. R rows are the tokens of all texts of a call; decoded tokens
// come first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/inference/mixer_problem.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"
#include "efla/nn/inference/text_run.h"
#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

// Mixers of one plan, one per layer that has a mixer. A text's slot holds the states of all these layers.
class DeltaMixers {
 public:
  struct Layer {
    Vector o_norm, taps;
    Vector beta_factor;    // [HV]: beta_scale · softplus(α)
    Vector rate, dt_bias;  // of the decay, by decay_rate: [HV]; [HV] or [HV·K]
    Vector gate_bias;      // of the sigmoid gate [HV·V]
    Vector correction;     // [H] D sigmoid(decay) of the erase key closed_loop
    PackedWeight in;       // of MixerPlan::projections
    PackedWeight f_out, g_out, o_proj;
  };

  // config: one whose MixerPlan::refusal is "".
  explicit DeltaMixers(const MixerConfig& config);

  void add(Layer layer) { layers_.push_back(std::move(layer)); }

  const MixerPlan& plan() const { return plan_; }
  std::size_t weight_bytes() const;
  std::size_t state_floats() const { return layers_.size() * static_cast<std::size_t>(layer_floats_); }
  // Returns the parts of a slot; `prefixes` has the beginning of the names of each layer's parts.
  std::vector<StatePart> state_parts(std::span<const std::string> prefixes) const;

  // Begins a call, whose runs are as in InferenceModel::advance.
  void begin(std::int64_t rows, std::span<const TextRun> runs, std::vector<Draft>* drafts);
  // Maps the inputs x [R, D] of mixer number `layer` to its outputs y [R, D], which may be x, and advances the states.
  // The calls of one step go through the layers in their order.
  void mix(std::int64_t layer, const View<float, 2>& x, const View<float, 2>& y, std::span<const TextRun> runs,
           StatePool& states, ThreadPool& pool);
  // Does what InferenceModel::accept does.
  void accept(const Draft& draft, std::int64_t tokens, StatePool& states, ThreadPool& pool);

 private:
  void convolve(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool);
  void compute_gates(const Layer& layer, ThreadPool& pool);
  void form_keys(const Layer& layer, std::span<const TextRun> runs);
  MixerRows with_steps(MixerRows rows);
  void recur(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool);
  void recur_prompt(const TextRun& run, std::int64_t row, const float* qkv, std::span<float> memory, ThreadPool& pool);
  void keep_draft(Draft& draft, std::int64_t row, std::int64_t at);
  void recur_draft(const Draft& draft, std::int64_t layer, std::int64_t tokens, std::span<float> memory, float* o,
                   ThreadPool& pool);

  MixerPlan plan_;
  std::int64_t memory_floats_, layer_floats_;  // of a layer's state: the matrices, and all
  std::vector<Layer> layers_;

  std::int64_t rows_ = 0, decodes_ = 0;   // of the call; decodes_: runs of one token
  std::vector<Draft>* drafts_ = nullptr;  // the caller's list
  RowBuffer projected_, window_, mixed_, beta_, decay_, erase_key_, step_keys_, step_values_, o_, gate_, final_state_;
};

}  // namespace efla::nn
