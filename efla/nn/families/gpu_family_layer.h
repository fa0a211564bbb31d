// A layer of GpuFamilyModel, and the prompts of a call.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "efla/nn/families/gpu_family_model.h"
#include "efla/nn/inference/gpu_step.h"

namespace efla::nn {

struct GpuFamilyModel::Layer {
  bool attends = false;
  std::int64_t index = 0;                                          // among the layers of attention
  torch::Tensor before_mixer, after_mixer, before_mlp, after_mlp;  // norms; undefined: none
  torch::Tensor out, gate_up, down;                                // weights

  StepMixer mixer;               // of a delta layer
  torch::Tensor a_log, dt_bias;  // of its decay
  bool has_kernel = false;       // whether the kernel mixer_step takes it
  torch::Tensor memory, conv;    // the states of all slots, and one more for entries without a text

  torch::Tensor in, q_norm, k_norm;  // of an attention layer
};

// The runs of a call, with what all layers need of them on the device.
struct GpuFamilyModel::Prompts {
  Prompts(std::span<const TextRun> runs, const FamilyConfig& config, torch::Device device);

  std::span<const TextRun> runs;
  torch::Tensor cu_seqlens;        // [N + 1]
  torch::Tensor slots, positions;  // [T]: of each token, the slot of its text and its number in the text
  torch::Tensor cos, sin;          // [T, 1, R/2] float32

  // The edges of the runs: the last W − 1 inputs of the convolution before each run, N·(W − 1) rows, and then the rows
  // `edge_rows` of the inputs. Each tensor has numbers of edges, or of tokens.
  torch::Tensor run_slots;   // [N]
  torch::Tensor edge_rows;   // of the inputs, the first and the last W − 1 of each run
  torch::Tensor last_edges;  // [N·(W − 1)]: the inputs that the next run of each text needs
  // Of the first tokens of runs that continue a text; undefined if there is none.
  torch::Tensor window_edges, window_ends;  // a window per such run, and the windows' ends
  struct WindowOutput {
    std::int64_t row, first_token, tokens;  // of the windows; of the call
  };
  std::vector<WindowOutput> window_outputs;  // per such run
};

}  // namespace efla::nn
