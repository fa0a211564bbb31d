// Bytes on their way to a client.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace efla::serve {

// A queue of bytes. Not for several threads at once. Where an append throws std::bad_alloc, the queue is as it was.
class SendQueue {
 public:
  static constexpr std::size_t kPiece = 64 << 10;  // bytes of one write, which has its own time limit

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  bool writing() const { return writing_; }

  void append(std::string bytes) {
    if (bytes.empty()) return;
    const auto added = bytes.size();
    const bool joins =
        pieces_.size() > (writing_ ? 1U : 0U) && !pieces_.back().held && pieces_.back().bytes.size() + added <= kPiece;
    if (joins) {
      pieces_.back().bytes += bytes;
    } else {
      pieces_.push_back({std::move(bytes), nullptr});
    }
    size_ += added;
  }
  // Appends a reply. `held` lives until the body is sent.
  void append(std::string head, std::string body, std::shared_ptr<void> held) {
    if (body.size() < kPiece) return append(head + body);
    const auto added = head.size() + body.size();
    pieces_.push_back({std::move(head), nullptr});
    try {
      pieces_.push_back({std::move(body), std::move(held)});
    } catch (...) {
      pieces_.pop_back();
      throw;
    }
    size_ += added;
  }

  // Returns the next bytes to write, which stay where they are until written().
  std::string_view begin_write() {
    writing_ = true;
    return std::string_view(pieces_.front().bytes).substr(sent_, kPiece);
  }
  void written() {
    writing_ = false;
    const auto bytes = std::min(kPiece, pieces_.front().bytes.size() - sent_);
    sent_ += bytes;
    size_ -= bytes;
    if (sent_ < pieces_.front().bytes.size()) return;
    pieces_.pop_front();
    sent_ = 0;
  }

 private:
  struct Piece {
    std::string bytes;
    std::shared_ptr<void> held;
  };

  std::deque<Piece> pieces_;
  std::size_t size_ = 0;  // bytes that are not written
  std::size_t sent_ = 0;  // bytes of the first piece that are written
  bool writing_ = false;
};

}  // namespace efla::serve
