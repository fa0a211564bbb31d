// How a language model is trained: the tables [data] and [training] of a configuration.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "efla/io/fields.h"
#include "efla/train/learning_rate.h"

namespace efla::train {

struct LmDataOptions {
  std::string train;       // folder of token shards
  std::string validation;  // the same, "" for no evaluation
  std::string tokenizer;   // as data::load_tokenizer: for bits per byte and for samples; "" for neither
};

// The defaults are the values of EFLA's appendix A where it has them.
struct LmTrainOptions {
  std::int64_t sequence_length = 2048;     // T, tokens of a row
  std::int64_t tokens_per_step = 1 << 20;  // of all processes together
  std::int64_t micro_batch = 1;            // rows that a thread, or a GPU, computes at a time
  std::int64_t steps = 0;                  // one of steps and tokens is given, the other 0
  std::int64_t tokens = 0;                 // the run has as many steps as cover this number
  double lr = 3e-4;                        // the peak
  double min_lr = 3e-5;                    // where the warm-up begins and the cosine ends
  std::int64_t warmup_steps = 1024;
  double weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double clip = 1.0;  // largest gradient norm; 0 does not clip
  std::uint64_t seed = 42;
  bool recompute = false;  // activation checkpointing
  std::string precision =
      "float32";  // of matrix products: float32, or bfloat16 (autocast, on GPUs); parameters: float32

  std::int64_t evaluate_every = 0;   // steps; 0: at the end only
  std::int64_t evaluate_tokens = 0;  // number of validation tokens; 0: all
  std::int64_t sample_every = 0;     // steps; 0: never
  std::int64_t sample_tokens = 64;
  std::string sample_prompt;
  std::int64_t checkpoint_every = 0;  // steps; 0: at the end only
  std::int64_t keep_checkpoints = 2;  // number of checkpoints kept, the newest ones

  std::int64_t total_steps() const;
  std::int64_t rows_per_step() const { return tokens_per_step / sequence_length; }
};

struct LmOptions {
  LmDataOptions data;
  LmTrainOptions training;
};

// Reads a configuration {"model": …, "data": …, "training": …}. Throws for an unknown table or key, naming the nearest,
// and for a value of another type or out of range. [model] is left to the model.
LmOptions lm_options_from_json(const io::Fields& config);

// Returns every key with its value, as lm_options_from_json reads it: {"data": …, "training": …}.
nlohmann::json to_json(const LmOptions& options);

// Returns the rate of every step: a warm-up from min_lr to lr, then half a cosine back to min_lr.
LearningRate learning_rate(const LmTrainOptions& options);

}  // namespace efla::train
