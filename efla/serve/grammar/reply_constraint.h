// What a reply to a chat may be: reasoning of a limited length, then a text that follows a grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/constraint.h"
#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

struct ReplyRule {
  enum class Reasoning {
    none,   // the reply is the text that follows the grammar
    maybe,  // the reply may begin with <think> … </think>
    begun,  // the prompt ends with <think>
  };

  Reasoning reasoning = Reasoning::none;
  std::optional<std::int64_t> max_reasoning_tokens = {};  // then </think> follows
  std::shared_ptr<const Grammar> grammar = {};            // of the text behind the reasoning; null: any text
  std::vector<std::int32_t> ends = {};                    // ids that end a reply
};

// The tokens of a tokenizer that matter to the tags of reasoning. Threads may share it.
struct ReasoningTokens {
  // The tokenizer must outlive the object.
  explicit ReasoningTokens(const data::Tokenizer& tokenizer);

  const data::Tokenizer& tokenizer;
  std::vector<std::int32_t> opening;     // that may belong to <think>
  std::vector<std::int32_t> closing;     // that may complete </think> and continue behind it
  std::vector<std::int32_t> forced_end;  // that end the reasoning at its longest
};

// Returns the constraint of a rule.
std::shared_ptr<const engine::Constraint> make_constraint(std::shared_ptr<const ReasoningTokens> tokens,
                                                          ReplyRule rule);

}  // namespace efla::serve
