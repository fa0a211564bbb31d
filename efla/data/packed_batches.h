// Batches of packed sequences for training a language model, from a folder of token shards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "efla/base/ignore_index.h"
#include "efla/io/tokens/token_folder.h"

namespace efla::data {

// B sequences of T tokens, row after row. Flattened to [1, B·T] they are packed sequences: cu_seqlens has a boundary at
// the start of every row and at the end of every document, so that no document sees another.
struct PackedBatch {
  std::vector<std::int64_t> inputs;      // [B, T]; 0 for padding
  std::vector<std::int64_t> targets;     // [B, T] the document's next token; kIgnoreIndex at its end and for padding
  std::vector<std::int64_t> cu_seqlens;  // [N + 1], from 0 to B·T
  std::int64_t tokens = 0;               // number of inputs without padding
};

// The corpus cut into consecutive windows of `length` tokens; the last one may be shorter. A document that does not fit
// into a window is cut, and the next window continues it without the state before the cut.
class TokenWindows {
 public:
  // folder must outlive the object. Throws Error for a length below 1.
  TokenWindows(const io::TokenFolder& folder, std::int64_t length);

  std::int64_t count() const { return count_; }

  // Returns a batch whose rows are these windows, each in [0, count()).
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

// The position of the next batch: the windows before `index` of this epoch have been used. Equal for all ranks.
struct PackedPosition {
  std::int64_t epoch = 0, index = 0;

  bool operator==(const PackedPosition&) const = default;
};

// An endless sequence of batches. Each epoch visits every window once, in an order that depends only on the seed, the
// epoch and the number of windows. A batch at the end of an epoch is filled from the next epoch. The rows of all ranks,
// in the order of the ranks, are the batch that a single process would get.
class PackedBatches {
 public:
  // folder must outlive the object. Throws Error for invalid options.
  PackedBatches(const io::TokenFolder& folder, const PackedOptions& options);

  std::int64_t windows() const { return windows_.count(); }  // per epoch

  // Returns this rank's rows of the next batch.
  PackedBatch next();

  const PackedPosition& position() const { return position_; }
  // Resumes at a position that position() returned. Throws Error if there is no such epoch or window.
  void seek(const PackedPosition& position);

 private:
  TokenWindows windows_;
  PackedOptions options_;
  PackedPosition position_;
};

}  // namespace efla::data
