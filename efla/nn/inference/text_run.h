// Texts that a model continues on the CPU: the tokens of a call, and the states in slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "efla/rule/problem.h"

namespace efla::nn {

// A prompt may be cut into several runs at multiples of this many tokens of the text, with the same bits.
inline constexpr std::int64_t kCutTokens = 64;

// Tokens of a text that can be decoded together.
inline constexpr std::int64_t kMostDecoded = kMaxStepTokens;

// Tokens of one text that follow one another.
struct TextRun {
  std::int64_t slot = 0;   // slot of the pool; no other run of the call has this slot
  std::int64_t begin = 0;  // tokens of the text before the run
  std::int64_t tokens = 1;
  bool decode = false;  // true: computed like decode steps; one token, or a draft of up to kMostDecoded tokens
};

// A run of several decoded tokens, and the inputs of its recurrence in every layer, layer after layer.
struct Draft {
  TextRun run;
  std::vector<float> window, mixed;  // [layers, W − 1 + tokens, channels], inputs and outputs of the convolution
  std::vector<float> beta, decay;    // [layers, tokens, HV], [layers, tokens, HV or HV·K]
};

// The states of texts: one slot per text, of the same size for any length of the text.
class StatePool {
 public:
  StatePool(std::int64_t slots, std::size_t slot_floats)
      : slots_(slots),
        slot_floats_(slot_floats),
        data_(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(slots) * slot_floats)) {}

  std::int64_t slots() const { return slots_; }
  std::span<float> slot(std::int64_t index) { return {data_.get() + index * slot_floats_, slot_floats_}; }

 private:
  std::int64_t slots_;
  std::size_t slot_floats_;
  std::unique_ptr<float[]> data_;
};

// A part of a state with its name and shape, and its place in floats.
struct StatePart {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset, floats;
};

}  // namespace efla::nn
