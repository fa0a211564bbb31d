#include "efla/data/file_documents.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "efla/base/utf8.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/unpack.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kReadStep = std::size_t{1} << 18;
constexpr std::size_t kMaxLine = std::size_t{1} << 28;

// The unpacked text of a file, in a buffer that grows at its end and is consumed from its front.
class TextBuffer {
 public:
  explicit TextBuffer(const fs::path& path)
      : file_(path), name_(path.string() + (file_.packing() == io::Packing::none ? "" : " (unpacked)")) {}

  std::string_view text() const { return std::string_view(bytes_).substr(taken_); }
  bool at_end() const { return at_end_; }
  std::uint64_t position() const { return file_.position(); }
  const std::string& name() const { return name_; }

  void grow() {
    bytes_.erase(0, taken_);
    taken_ = 0;
    const auto size = bytes_.size();
    bytes_.resize(size + kReadStep);
    const auto count = file_.read({reinterpret_cast<std::uint8_t*>(bytes_.data()) + size, kReadStep});
    bytes_.resize(size + count);
    at_end_ = count < kReadStep;
  }

  void take(std::size_t count) {
    taken_ += count;
    offset_ += count;
  }

  // `at` counts from the front of text().
  [[noreturn]] void fail(std::size_t at, const std::string& what) const { io::fail_at(name_, offset_ + at, what); }

  std::uint64_t offset() const { return offset_; }

 private:
  io::UnpackedFile file_;
  std::string name_, bytes_;
  std::size_t taken_ = 0;
  std::uint64_t offset_ = 0;  // of text() in the unpacked file
  bool at_end_ = false;
};

class TextDocuments final : public FileDocuments {
 public:
  TextDocuments(const fs::path& path, std::string separator) : buffer_(path), separator_(std::move(separator)) {}

  bool next(Chunk& chunk) override {
    for (;;) {
      const auto text = buffer_.text();
      if (const auto newline = text.find('\n', line_); newline != std::string_view::npos) {
        if (!is_separator(text.substr(line_, newline - line_))) {
          line_ = newline + 1;
          line_is_whole_ = true;
        } else if (end_document(chunk, line_, newline + 1)) {
          return true;
        }
      } else if (buffer_.at_end()) {
        return end_document(chunk, is_separator(text.substr(line_)) ? line_ : text.size(), text.size());
      } else if (text.size() < kReadStep || !take_front(chunk)) {
        buffer_.grow();
        check();
        if (buffer_.offset() == 0 && buffer_.text().starts_with(kByteOrderMark)) take(kByteOrderMark.size());
      } else {
        return true;
      }
    }
  }

  std::uint64_t position() const override { return buffer_.position(); }

 private:
  // Whether the line equals the separator, with or without the carriage return of a file with CRLF.
  bool is_separator(std::string_view line) const {
    return line_is_whole_ && line.starts_with(separator_) &&
           (line.size() == separator_.size() || line.substr(separator_.size()) == "\r");
  }

  // Ends the document after `size` bytes; the next one starts at `next`. Returns false if there is no document.
  bool end_document(Chunk& chunk, std::size_t size, std::size_t next) {
    const bool exists = begun_ || size > 0;
    chunk.text = buffer_.text().substr(0, size);
    chunk.ends = true;
    take(next);
    line_is_whole_ = true;
    begun_ = false;
    return exists;
  }

  // Takes the text that certainly belongs to the current document: whole lines, or what is there of a line that is
  // longer than the separator and a carriage return. Returns false if there is none.
  bool take_front(Chunk& chunk) {
    const auto text = buffer_.text();
    const bool long_line = !line_is_whole_ || text.size() - line_ > separator_.size() + 1;
    const auto size = long_line ? valid_ : line_;
    if (size == 0) return false;
    chunk.text = text.substr(0, size);
    chunk.ends = false;
    take(size);
    line_is_whole_ = !long_line;
    begun_ = true;
    return true;
  }

  void take(std::size_t size) {
    buffer_.take(size);
    valid_ -= size;
    line_ = 0;
  }

  // Checks that the text read is UTF-8, except for an incomplete last character.
  void check() {
    const auto text = buffer_.text();
    valid_ += utf8_prefix(text.substr(valid_));
    if (valid_ == text.size() || (!buffer_.at_end() && utf8_character(text.substr(valid_)) < 0)) return;
    buffer_.fail(valid_, "not UTF-8");
  }

  TextBuffer buffer_;
  std::string separator_;
  std::size_t line_ = 0;       // start of the current line in the buffer's text
  std::size_t valid_ = 0;      // bytes of the text that are UTF-8
  bool line_is_whole_ = true;  // no part of the current line was taken
  bool begun_ = false;         // a part of the document was taken
};

class JsonDocuments final : public FileDocuments {
 public:
  JsonDocuments(const fs::path& path, std::string field) : buffer_(path), field_(std::move(field)) {}

  bool next(Chunk& chunk) override {
    chunk.ends = true;
    for (;;) {
      const auto text = buffer_.text();
      const auto newline = text.find('\n', searched_);
      if (newline == std::string_view::npos && !buffer_.at_end()) {
        if (text.size() > kMaxLine) buffer_.fail(0, fmt::format("line {} has more than 256 MiB", line_ + 1));
        searched_ = text.size();
        buffer_.grow();
        continue;
      }
      if (text.empty()) return false;
      const auto line = text.substr(0, newline);
      ++line_;
      chunk.text = line.find_first_not_of(" \t\r") == std::string_view::npos ? "" : read_field(line);
      buffer_.take(std::min(line.size() + 1, text.size()));
      searched_ = 0;
      if (!chunk.text.empty()) return true;
    }
  }

  std::uint64_t position() const override { return buffer_.position(); }

 private:
  std::string read_field(std::string_view line) const {
    if (const auto valid = utf8_prefix(line); valid < line.size()) buffer_.fail(valid, "not UTF-8");
    const auto value = io::parse_json_line(line, buffer_.name(), buffer_.offset());
    const auto offset = static_cast<std::int64_t>(buffer_.offset());
    return io::Fields(value, io::refuse_in_file(buffer_.name(), fmt::format("line {}: ", line_), offset))
        .get<std::string>(field_);
  }

  TextBuffer buffer_;
  std::string field_;
  std::size_t searched_ = 0;  // bytes of the buffer's text without a newline
  std::int64_t line_ = 0;     // number of the current line, from 1
};

}  // namespace

std::unique_ptr<FileDocuments> open_documents(const fs::path& path, const DocumentFormat& format) {
  const auto extension_of = [](const fs::path& name) {  // in lower case
    std::string extension = name.extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
    return extension;
  };
  auto extension = extension_of(path.filename());
  if (extension == ".gz" || extension == ".xz" || extension == ".zst") extension = extension_of(path.stem());
  if (extension == ".jsonl" || extension == ".ndjson" || extension == ".json") {
    return std::make_unique<JsonDocuments>(path, format.field);
  }
  return std::make_unique<TextDocuments>(path, format.separator);
}

}  // namespace efla::data
