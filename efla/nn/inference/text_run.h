// Texts that a model continues on the CPU: the tokens of a call, and the states in slots and outside of slots.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
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
  std::vector<float> beta, decay;    // [layers, tokens, n·HV], [layers, tokens, HV or HV·K]
  std::vector<float> erase_key;      // [layers, tokens, H·K] of a rule with two keys
  std::vector<float> hidden = {};    // [tokens, D], inputs of the head; only of a model with a draft head
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

// Allocates memory that begins with a cache line, because a load across two lines takes longer.
template <class T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kCacheLine{64};

  CacheLineAllocator() = default;
  template <class U>
  explicit CacheLineAllocator(const CacheLineAllocator<U>& /*other*/) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kCacheLine)); }
  void deallocate(T* p, std::size_t /*n*/) { ::operator delete(p, kCacheLine); }
  bool operator==(const CacheLineAllocator&) const = default;
};

// The types in which keys and values may be stored.
enum class KeyValueType { float32, bfloat16 };

// The keys and values of consecutive tokens in all layers of softmax attention. A page whose tokens are all in the text
// never changes, so that texts and states outside of slots hold the same page.
struct PageBytes : std::vector<std::byte, CacheLineAllocator<std::byte>> {
  using vector::vector;
  // A copy may change, and has another id.
  PageBytes(const PageBytes& other) : vector(other) {}
  PageBytes& operator=(const PageBytes&) = delete;

  std::uint64_t id = next_id();  // unique, but for the pages that a GPU's memory has filled anew with the same bytes

 private:
  static std::uint64_t next_id() {
    static std::atomic<std::uint64_t> count{0};
    return ++count;
  }
};
using Page = std::shared_ptr<const PageBytes>;

// The state of a text outside of a slot. It never changes, and copies share its memory.
struct TextState {
  std::int64_t tokens = 0;                             // that the state has seen
  std::shared_ptr<const std::vector<float>> constant;  // the part outside of pages
  std::vector<Page> pages = {};  // in the order of the text; behind the last token a page has zeros
};

}  // namespace efla::nn
