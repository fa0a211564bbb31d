// Log-likelihoods of texts under a language model, tokenized and cut as EleutherAI's lm-evaluation-harness does.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "efla/base/stop.h"
#include "efla/data/tokenizers/tokenizer.h"

namespace efla::eval {

// Rows of tokens, padded with 0 on the right to one length, and the tokens to be scored.
struct ScoreBatch {
  // Wanted is p(token | the row's tokens up to and with position).
  struct Target {
    std::int64_t row = 0, position = 0, token = 0;
  };

  std::int64_t rows = 0, length = 0;
  std::vector<std::int64_t> tokens;  // [rows, length]
  std::vector<Target> targets;
};

struct TargetScore {
  double log_probability = 0.0;  // natural logarithm
  bool greedy = false;           // whether no other token is more probable
};

// A model: one score per target. The score of a target must not depend on the tokens behind its position.
using Scorer = std::function<std::vector<TargetScore>(const ScoreBatch&)>;

// Tokens of which the last `scored` are scored, each given all tokens before it. At least one token is not scored.
struct ScoreRequest {
  std::vector<std::int32_t> tokens;
  std::int64_t scored = 0;
};

struct TextOptions {
  std::int64_t max_length = 2048;  // most tokens that the model reads at once; more are cut off at the start
  bool bos = false;                // every text begins with the tokenizer's bos
};

// Returns the request for log p(continuation | context). White space at the context's end moves to the continuation.
// Both are tokenized as one text, and the tokens of the context are not scored. Without a context, bos takes its place,
// or eos if the tokenizer has no bos. Throws Error if the tokenizer lacks the token, and if nothing or more than
// max_length tokens are left to score.
ScoreRequest continuation_request(const data::Tokenizer& tokenizer, std::string_view context,
                                  std::string_view continuation, const TextOptions& options);

// Returns the requests for log p(text), every token once, in windows of at most max_length. The first window begins
// with bos (or eos), the last one has full length, and the others begin with the token before them.
std::vector<ScoreRequest> document_requests(const data::Tokenizer& tokenizer, std::string_view text,
                                            const TextOptions& options);

struct Likelihood {
  double log_likelihood = 0.0;
  bool greedy = true;  // whether every scored token is
};

struct ScoreEvents {
  StopFunction stop;                                                  // asked before every batch; ends with Stopped
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // counts requests
};

// Returns the scores in the order of the requests. The scorer gets the longest requests first, in batches of at most
// batch_tokens tokens but at least one row. Requests that differ only in their last token share a row. Throws
// std::runtime_error if the scorer returns NaN.
std::vector<Likelihood> score(const std::vector<ScoreRequest>& requests, const Scorer& scorer,
                              std::int64_t batch_tokens, const ScoreEvents& events = {});

}  // namespace efla::eval
