// What restricts the tokens of a reply, such as a grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace efla::engine {

// The state of a restriction after the tokens of one reply so far. The engine calls the functions of one object one
// after the other.
class Constraint {
 public:
  virtual ~Constraint() = default;

  // Returns a copy that advances by itself.
  virtual std::unique_ptr<Constraint> clone() const = 0;
  // Sets the logits of the tokens that may not come next to −infinity. logits: of the ids that the tokenizer has.
  virtual void exclude(std::span<float> logits) = 0;
  // Advances by a token that did not end the reply.
  virtual void take(std::int32_t id) = 0;
};

}  // namespace efla::engine
