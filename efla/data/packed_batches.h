// Batches of packed sequences for training a language model, from a folder of token shards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "efla/io/token_folder.h"

namespace efla::data {

// A target that has no loss: PyTorch's ignore_index.
inline constexpr std::int64_t kNoTarget = -100;

// B sequences of T tokens, row after row. Flattened to [1, B·T] they are packed sequences: cu_seqlens has a boundary at
// every row's start and wherever a document ends, so that no document sees another.
struct PackedBatch {
  std::int64_t batch = 0, length = 0;
  std::vector<std::int64_t> inputs;      // [B, T]; 0 where a row has no token
  std::vector<std::int64_t> targets;     // [B, T] the next token of the same document; kNoTarget at its last
  std::vector<std::int64_t> cu_seqlens;  // [N + 1], from 0 to B·T
  std::int64_t tokens = 0;               // inputs that are tokens: all but the padding of the corpus's last window
};

// The corpus cut into windows of `length` tokens, in order; the last one may be shorter. Documents are cut where a
// window ends: the next window goes on without what came before.
class TokenWindows {
 public:
  // folder must outlive it. Throws Error for a length below 1.
  TokenWindows(const io::TokenFolder& folder, std::int64_t length);

  std::int64_t count() const { return count_; }
  std::int64_t length() const { return length_; }

  // The windows, each in [0, count()), as the rows of one batch.
  PackedBatch read(std::span<const std::int64_t> windows) const;

 private:
  void read_row(std::int64_t window, std::int64_t row, PackedBatch& batch) const;

  const io::TokenFolder& folder_;
  std::int64_t length_, count_;
};

struct PackedOptions {
  std::int64_t length = 0;  // T
  std::int64_t batch = 0;   // rows of all ranks together; a multiple of world_size
  std::uint64_t seed = 0;
  int rank = 0, world_size = 1;
};

// What the next batch begins with: the windows before `index` of this epoch have been used. The same for every rank.
struct PackedPosition {
  std::int64_t epoch = 0, index = 0;

  bool operator==(const PackedPosition&) const = default;
};

// Batch after batch without end. Each epoch visits every window once, in an order of its own that depends on seed,
// epoch and their number; a batch at an epoch's end is filled from the next. All ranks' rows, in the order of the
// ranks, are the batch of a single rank.
class PackedBatches {
 public:
  // folder must outlive it. Throws Error for options that do not fit.
  PackedBatches(const io::TokenFolder& folder, const PackedOptions& options);

  std::int64_t windows() const { return windows_.count(); }  // of an epoch

  PackedBatch next();

  const PackedPosition& position() const { return position_; }
  // Goes on from a position that position() returned. Throws Error where there is no such window.
  void seek(const PackedPosition& position);

 private:
  TokenWindows windows_;
  PackedOptions options_;
  PackedPosition position_;
};

}  // namespace efla::data
