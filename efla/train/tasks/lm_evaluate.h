// The loss of a language model on held-out tokens.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "efla/base/stop.h"
#include "efla/data/packed_batches.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/nn/models/language_model.h"
#include "efla/train/distributed/data_parallel.h"
#include "efla/train/distributed/process_group.h"
#include "efla/train/tasks/lm_options.h"

namespace efla::train {

// Packed sequences as a model reads them, on its device.
struct LmBatch {
  torch::Tensor inputs, targets;  // [1, N] int64
  torch::Tensor cu_seqlens;       // [sequences + 1] int64
  std::int64_t counted = 0;       // targets that are not kIgnoreIndex
  std::int64_t tokens = 0;        // inputs that are tokens
};

// Copies a batch to a device without waiting for it. On a GPU sequences without tokens follow the others, so that few
// numbers of sequences occur and a CUDA graph fits many batches.
LmBatch make_batch(const data::PackedBatch& batch, torch::Device device);

// A copy of a language model as training and evaluation use it.
struct LmReplica {
  nn::NamedParameters parameters;  // float32 leaves, in a fixed order
  // Returns the mean cross-entropy over the targets that count, a scalar with its graph.
  std::function<torch::Tensor(const LmBatch&)> loss;
  // Whether loss does equal work for batches of equal shapes and never waits for a GPU.
  bool repeats = false;
};

// Returns a replica of a model whose vocabulary includes the tokens of every batch. The replica does not check them.
LmReplica replica_of(const std::shared_ptr<nn::LanguageModel>& model);

struct LmEvaluation {
  double loss = 0.0;                    // mean cross-entropy in nats per token
  double perplexity = 0.0;              // its exponential, which may be beyond float64: infinite
  std::optional<double> bits_per_byte;  // of the text that the tokens stand for, where their bytes are known
  std::int64_t tokens = 0;              // that were predicted
};

// What tokens stand for.
struct TokenBytes {
  std::vector<std::int64_t> bytes;  // of each token of the vocabulary; empty: unknown
  std::int64_t space_after = -1;    // the token after this one begins with a space that the text lacks; −1: none
};

// Returns whether the first `tokens` of the corpus (0: all), in rows of `length`, hold a token that is predicted: one
// that is not the first of its document.
bool has_targets(const io::TokenFolder& corpus, std::int64_t length, std::int64_t tokens);

// Measures the model on the first evaluate_tokens of the corpus, in rows of sequence_length that do not see each other,
// micro_batch rows at a time, distributed over the ranks. `copies` has the copies of `model`. The same bits for any
// number of ranks and copies. Throws Stopped where a rank's stop says so.
LmEvaluation evaluate(const DataParallel& model, const std::vector<LmReplica>& copies, const io::TokenFolder& corpus,
                      const LmTrainOptions& options, ProcessGroup& group, const TokenBytes& token_bytes = {},
                      const StopFunction& stop = {});

}  // namespace efla::train
