#include "efla/data/packed_batches.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "efla/base/check.h"
#include "efla/data/permutation.h"

namespace efla::data {
namespace {

constexpr std::uint64_t kWindowStream = std::uint64_t{0x7E57} << 48;  // separates this use of the seed from others
constexpr std::int64_t kMaxEpoch = std::int64_t{1} << 40;             // far from overflow, and below kWindowStream

}  // namespace

TokenWindows::TokenWindows(const io::TokenFolder& folder, std::int64_t length) : folder_(folder), length_(length) {
  const Require require("packed batches");
  require(length >= 1, "length", length, "at least 1");
  count_ = (folder.tokens() - 1) / length + 1;
}

PackedBatch TokenWindows::read(std::span<const std::int64_t> windows) const {
  PackedBatch batch;
  batch.inputs.assign(windows.size() * static_cast<std::size_t>(length_), 0);
  batch.targets.assign(batch.inputs.size(), kIgnoreIndex);
  batch.cu_seqlens.push_back(0);
  for (std::size_t row = 0; row < windows.size(); ++row) {
    read_row(windows[row], static_cast<std::int64_t>(row), batch);
  }
  return batch;
}

void TokenWindows::read_row(std::int64_t window, std::int64_t row, PackedBatch& batch) const {
  const auto begin = window * length_, end = std::min(begin + length_, folder_.tokens());
  const auto offset = row * length_ - begin;  // from a token's place in the corpus to its place in the batch
  const auto inputs = std::span(batch.inputs).subspan(static_cast<std::size_t>(begin + offset));
  const auto targets = std::span(batch.targets).subspan(static_cast<std::size_t>(begin + offset));
  folder_.read(begin, inputs.first(static_cast<std::size_t>(end - begin)));
  batch.tokens += end - begin;
  for (auto token = begin; token < end;) {
    const auto document_end = folder_.document_end(token);
    const auto stop = std::min(document_end, end);
    // The targets are the inputs shifted by one token. If the next window continues the document, the last target is
    // that window's first token.
    const auto first = static_cast<std::size_t>(token - begin), last = static_cast<std::size_t>(stop - begin) - 1;
    std::copy(inputs.begin() + static_cast<std::ptrdiff_t>(first) + 1,
              inputs.begin() + static_cast<std::ptrdiff_t>(last) + 1,
              targets.begin() + static_cast<std::ptrdiff_t>(first));
    if (stop < document_end) folder_.read(stop, targets.subspan(last, 1));
    batch.cu_seqlens.push_back(stop + offset);
    token = stop;
  }
  if (end < begin + length_) batch.cu_seqlens.push_back((row + 1) * length_);  // the padding is a sequence of its own
}

PackedBatches::PackedBatches(const io::TokenFolder& folder, const PackedOptions& options)
    : windows_(folder, options.length), options_(options) {
  const auto& o = options_;
  const Require require("packed batches");
  require(o.world_size >= 1, "world_size", o.world_size, "at least 1");
  require(o.rank >= 0 && o.rank < o.world_size, "rank", o.rank, fmt::format("0 to {}", o.world_size - 1));
  require(o.batch >= 1 && o.batch % o.world_size == 0, "batch", o.batch,
          fmt::format("a multiple of the {} ranks", o.world_size));
}

PackedBatch PackedBatches::next() {
  const auto rows = options_.batch / options_.world_size;
  const auto first = position_.index + options_.rank * rows;  // may be beyond the end of the epoch
  std::vector<std::int64_t> chosen;
  auto epoch = position_.epoch + first / windows();
  auto index = first % windows();
  while (std::cmp_less(chosen.size(), rows)) {
    const Permutation order(windows(), options_.seed, kWindowStream + static_cast<std::uint64_t>(epoch));
    for (; index < windows() && std::cmp_less(chosen.size(), rows); ++index) chosen.push_back(order(index));
    index = 0;
    ++epoch;
  }
  const auto after = position_.index + options_.batch;
  position_ = {position_.epoch + after / windows(), after % windows()};
  return windows_.read(chosen);
}

void PackedBatches::seek(const PackedPosition& position) {
  const Require require("packed batches");
  require(position.epoch >= 0 && position.epoch <= kMaxEpoch, "epoch", position.epoch,
          fmt::format("0 to {}", kMaxEpoch));
  require(position.index >= 0 && position.index < windows(), "index", position.index,
          fmt::format("0 to {}", windows() - 1));
  position_ = position;
}

}  // namespace efla::data
