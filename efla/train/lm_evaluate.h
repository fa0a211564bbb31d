// The loss of a language model on held-out tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "efla/io/token_folder.h"
#include "efla/train/evaluate.h"
#include "efla/train/lm_options.h"
#include "efla/train/ranks.h"
#include "efla/train/replicas.h"

namespace efla::train {

struct LmEvaluation {
  double loss = 0.0;        // mean cross-entropy in nats a token
  double perplexity = 0.0;  // its exponential
  std::optional<double> bits_per_byte;  // of the text that the tokens stand for, where their bytes are known
  std::int64_t tokens = 0;              // that were predicted
};

// Over the first evaluate_tokens of the corpus, in rows of sequence_length that do not see each other, micro_batch rows
// at a time; ranks share them. The same bits for any number of ranks and threads. token_bytes: the bytes that each token
// of the vocabulary stands for, or nothing. Throws Stopped where a rank's stop says so.
LmEvaluation evaluate(Replicas& replicas, const io::TokenFolder& corpus, const LmTrainOptions& options, Ranks& ranks,
                      const std::vector<std::int64_t>& token_bytes = {}, const StopFunction& stop = {});

}  // namespace efla::train
