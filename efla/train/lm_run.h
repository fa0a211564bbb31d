// A language model's training run in a folder of its own, which goes on to the same bits after any interruption:
//   run.json                    what is trained, and with what
//   metrics.jsonl               a line a step, an evaluation and a sample
//   tensorboard/                the same numbers for TensorBoard
//   checkpoints/step-NNNNNN/    config.json, model.safetensors, optimizer.safetensors, trainer.json
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/train/checkpoint_folder.h"
#include "efla/train/lm_evaluate.h"
#include "efla/train/lm_trainer.h"
#include "efla/train/run.h"

namespace efla::train {

inline constexpr const char* kRunFile = "run.json";

struct LmRunModel {
  // config.json and model.safetensors, to and from a folder.
  std::function<void(const std::filesystem::path&folder)> write, read;
  // The text that goes on from sample_prompt.
  std::function<std::string()> sample;
};

struct LmRunData {
  const io::TokenFolder* train = nullptr;
  const io::TokenFolder* validation = nullptr;  // null: no evaluation
  TokenBytes token_bytes;                       // as evaluate takes it
};

struct LmRunEvents {
  StopFunction stop;  // asked after each step and during evaluation
  std::function<void(const LmStepResult&, double tokens_per_second)> step;
  std::function<void()> evaluating;
  std::function<void(std::int64_t step, const LmEvaluation&)> evaluated;
  std::function<void(std::int64_t step, const std::string& text)> sampled;
};

// The arguments that stay the same over a run. config is the whole configuration, defaults filled in: what a checkpoint
// must agree on to be continued.
struct LmRun {
  std::filesystem::path folder;  // exists
  nlohmann::json config;
  LmTrainOptions options;
  LmRunData data;
  LmRunModel model;
};

// Trains for all steps, starting from the folder's latest checkpoint where there is one; called by all ranks, of which
// rank 0 alone writes. Lines of metrics.jsonl: {"event": "step", step, tokens, loss, lr, grad_norm, tokens_per_second,
// seconds}, {"event": "evaluation", step, tokens, loss, perplexity, bits_per_byte, seconds}, {"event": "sample", step,
// tokens, text, seconds}; only tokens_per_second and seconds differ between two runs. A stop saves and returns. Throws
// std::runtime_error at a loss or gradient that is not finite, and where a checkpoint cannot be written, naming the
// last good one.
RunEnd train_lm(const LmRun& run, Replicas& replicas, Ranks& ranks, const LmRunEvents& events);

}  // namespace efla::train
