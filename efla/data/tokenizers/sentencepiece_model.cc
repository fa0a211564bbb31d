#include "efla/data/tokenizers/sentencepiece_model.h"

#include <bit>
#include <cmath>
#include <string_view>
#include <unordered_set>

#include <fmt/format.h>

#include "efla/base/utf8.h"
#include "efla/io/content_error.h"

namespace efla::data {
namespace {

using Kind = SentencePieceModel::Kind;
using Type = SentencePieceModel::Type;

// Ids have 32 bits, and no vocabulary is nearly as large.
constexpr std::size_t kMaxPieces = std::size_t{1} << 24;

// One message of a protocol buffer's wire format, read field by field.
class Message {
 public:
  Message(io::ByteView file, std::size_t begin, std::size_t end, const std::string& path)
      : file_(file), at_(begin), end_(end), path_(path) {}

  // Goes to the next field. Returns false at the end.
  bool next() {
    if (at_ == end_) return false;
    start_ = at_;
    const auto tag = read_varint();
    field_ = tag >> 3;
    wire_ = static_cast<int>(tag & 7);
    switch (wire_) {
      case 0:
        value_ = read_varint();
        break;
      case 1:
        value_ = read_fixed(8);
        break;
      case 2: {
        const auto size = read_varint();
        if (size > end_ - at_) fail(fmt::format("field {} goes beyond its message", field_));
        value_ = at_;
        at_ += size;
        break;
      }
      case 5:
        value_ = read_fixed(4);
        break;
      default:
        fail(fmt::format("wire type {} in a protocol buffer", wire_));
    }
    return true;
  }

  std::uint64_t field() const { return field_; }

  std::uint64_t number() const { return expect(0), value_; }
  bool flag() const { return number() != 0; }
  float real() const { return expect(5), std::bit_cast<float>(static_cast<std::uint32_t>(value_)); }
  Message message() const { return expect(2), Message(file_, value_, at_, path_); }
  std::string text() const {
    expect(2);
    return {reinterpret_cast<const char*>(file_.data()) + value_, at_ - value_};
  }

  template <class Enum>
  Enum choice(Enum last, const char* what) const {
    const auto value = number();
    if (value < 1 || value > static_cast<std::uint64_t>(last)) fail(fmt::format("unknown {} {}", what, value));
    return static_cast<Enum>(value);
  }

  // Throws with the place of the current field.
  [[noreturn]] void fail(const std::string& what) const {
    io::fail_at(path_, start_, "not a SentencePiece model: " + what);
  }

 private:
  void expect(int wire) const {
    if (wire_ != wire) fail(fmt::format("field {} has wire type {}, expected {}", field_, wire_, wire));
  }

  std::uint64_t read_varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at_ == end_) fail("cut short");
      const std::uint64_t byte = file_[at_++];
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    fail("a number of more than 64 bits");
  }

  std::uint64_t read_fixed(std::size_t bytes) {
    if (end_ - at_ < bytes) fail("cut short");
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= std::uint64_t{file_[at_ + i]} << (8 * i);
    at_ += bytes;
    return value;
  }

  io::ByteView file_;
  std::size_t at_, end_, start_ = 0;
  const std::string& path_;
  std::uint64_t field_ = 0, value_ = 0;  // value_: a number, or the start of bytes
  int wire_ = 0;
};

SentencePieceModel::Piece read_piece(Message message) {
  SentencePieceModel::Piece piece;
  while (message.next()) {
    if (message.field() == 1) piece.text = message.text();
    if (message.field() == 2) piece.score = message.real();
    if (message.field() == 3) piece.kind = message.choice(Kind::byte, "kind of piece");
  }
  return piece;
}

void read_trainer(Message message, SentencePieceModel& model) {
  while (message.next()) {
    switch (message.field()) {
      case 3:
        model.type = message.choice(Type::character, "type of model");
        break;
      case 24:
        model.whitespace_as_suffix = message.flag();
        break;
      case 35:
        model.byte_fallback = message.flag();
        break;
      case 44:
        model.unknown_surface = message.text();
        break;
      case 46:
        model.bos_piece = message.text();
        break;
      case 47:
        model.eos_piece = message.text();
        break;
      default:
        break;  // training parameters
    }
  }
}

void read_normalizer(Message message, SentencePieceModel& model) {
  while (message.next()) {
    if (message.field() == 2) model.normalizes = !message.text().empty();
    if (message.field() == 3) model.add_dummy_prefix = message.flag();
    if (message.field() == 4) model.remove_extra_whitespaces = message.flag();
    if (message.field() == 5) model.escape_whitespaces = message.flag();
  }
}

void read_denormalizer(Message message, SentencePieceModel& model) {
  while (message.next()) {
    if (message.field() == 2) model.denormalizes = !message.text().empty();
  }
}

}  // namespace

SentencePieceModel parse_sentencepiece_model(io::ByteView bytes, const std::string& path) {
  SentencePieceModel model;
  std::unordered_set<std::string> seen;
  Message message(bytes, 0, bytes.size(), path);
  while (message.next()) {
    if (message.field() == 1) {
      auto piece = read_piece(message.message());
      const auto id = model.pieces.size();
      if (id == kMaxPieces) message.fail("too many pieces");
      if (piece.text.empty()) message.fail(fmt::format("piece {} is empty", id));
      if (utf8_prefix(piece.text) != piece.text.size()) message.fail(fmt::format("piece {} is not UTF-8", id));
      if (!std::isfinite(piece.score)) message.fail(fmt::format("the score of piece {} is not finite", id));
      if (!seen.insert(piece.text).second) message.fail(fmt::format("piece {} occurs twice", id));
      model.pieces.push_back(std::move(piece));
    } else if (message.field() == 2) {
      read_trainer(message.message(), model);
    } else if (message.field() == 3) {
      read_normalizer(message.message(), model);
    } else if (message.field() == 5) {
      read_denormalizer(message.message(), model);
    }
  }
  if (model.pieces.empty()) {
    io::fail_in(path, "not a SentencePiece model: it has no pieces");
  }
  return model;
}

}  // namespace efla::data
