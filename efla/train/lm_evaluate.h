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
  double loss = 0.0;                    // mean cross-entropy in nats a token
  double perplexity = 0.0;              // its exponential
  std::optional<double> bits_per_byte;  // of the text that the tokens stand for, where their bytes are known
  std::int64_t tokens = 0;              // that were predicted
};

// What tokens stand for.
struct TokenBytes {
  std::vector<std::int64_t> bytes;  // of each token of the vocabulary; empty: not known
  std::int64_t space_after = -1;  // after this token comes one with a space in front that is not of the text; −1: none
};

// Over the first evaluate_tokens of the corpus, in rows of sequence_length that do not see each other, micro_batch rows
// at a time; ranks share them. The same bits for any number of ranks and replicas. Throws Stopped where a rank's stop
// says so.
LmEvaluation evaluate(Replicas& replicas, const io::TokenFolder& corpus, const LmTrainOptions& options, Ranks& ranks,
                      const TokenBytes& token_bytes = {}, const StopFunction& stop = {});

}  // namespace efla::train
