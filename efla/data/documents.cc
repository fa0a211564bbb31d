#include "efla/data/documents.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/data/file_documents.h"
#include "efla/io/content_error.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPart = std::size_t{1} << 16;
constexpr std::size_t kMaxUncut = 700'000'000;  // bytes; encode takes no longer text

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (auto at = fs::recursive_directory_iterator(folder); at != fs::recursive_directory_iterator(); ++at) {
    if (is_hidden(at->path())) {
      at.disable_recursion_pending();
    } else if (const auto status = fs::status(at->path(), error); fs::is_regular_file(status)) {
      files.push_back(at->path());
    } else if (at->is_symlink() || !fs::is_directory(status)) {  // links to folders could lead round in circles
      io::fail_in(at->path(), fs::is_directory(status)
                                  ? "is a link to a folder; give that folder as an input of its own"
                              : fs::exists(status) ? "is not a regular file"
                                                   : "is a link that leads nowhere");
    }
  }
  if (files.empty()) throw Error("data tokenize", "inputs", folder.string() + ", a folder without files", "text");
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.native() < b.native(); });
  return files;
}

}  // namespace

std::vector<fs::path> list_inputs(const std::vector<std::string>& inputs) {
  std::vector<fs::path> files;
  for (const auto& input : inputs) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (!fs::exists(status)) {
      throw IoError(IoError::Kind::missing, input, -1, "there is no such file or folder");
    }
    if (fs::is_directory(status)) {
      const auto below = files_below(input);
      files.insert(files.end(), below.begin(), below.end());
    } else if (fs::is_regular_file(status)) {
      files.emplace_back(input);
    } else {  // a pipe has no size, and its text is gone when the command runs again
      io::fail_in(input, "is not a regular file");
    }
  }
  return files;
}

DocumentReader::DocumentReader(std::vector<fs::path> files, DocumentFormat format, const Tokenizer& tokenizer)
    : files_(std::move(files)), format_(std::move(format)), tokenizer_(tokenizer) {}

DocumentReader::~DocumentReader() = default;

bool DocumentReader::next(DocumentPart& part) {
  while (!take_part(part)) {
    if (!read_chunk()) return false;
  }
  return true;
}

// Appends to the current document, or starts one. Returns false after the last document.
bool DocumentReader::read_chunk() {
  for (; input_ < files_.size(); ++input_) {
    if (open_ == nullptr) {
      open_ = open_documents(files_[input_], format_);
      document_ = 0;
    }
    FileDocuments::Chunk chunk;
    if (open_->next(chunk)) {
      pending_.erase(0, taken_);
      taken_ = 0;
      pending_ += chunk.text;
      ended_ = chunk.ends;
      return true;
    }
    bytes_before_ += open_->position();
    open_.reset();
  }
  return false;
}

// Returns a place where the pending text can be cut; 0: none. Throws IoError(content) if the part would be too long.
std::size_t DocumentReader::find_cut(std::string_view text) {
  for (auto reach = std::max(kPart, 2 * uncut_);; reach *= 2) {
    if (const auto cut = tokenizer_.last_cut(text.substr(0, std::min(reach, kMaxUncut))); cut > 0) return cut;
    if (reach >= std::min(text.size(), kMaxUncut)) break;
  }
  uncut_ = text.size();
  if (uncut_ > kMaxUncut) {
    io::fail_in(files_[input_], fmt::format("document {} has more than 700 MB that cannot be tokenized in parts; "
                                            "separator lines or .jsonl divide it into documents",
                                            document_));
  }
  return 0;
}

// Moves the next part of the pending text to `part`. Returns false if more text must be read first.
bool DocumentReader::take_part(DocumentPart& part) {
  const auto text = std::string_view(pending_).substr(taken_);
  // Waits for twice as much text each time, so that a text without a cut is not searched again and again.
  if (!ended_ && (text.size() <= kPart || text.size() < 2 * uncut_)) return false;
  const auto cut = text.size() <= kPart ? 0 : find_cut(text);
  if (cut == 0 && !ended_) return false;
  const auto size = cut > 0 ? cut : text.size();
  const bool last = ended_ && size == text.size();
  part = {std::string(text.substr(0, size)), input_, document_, !begun_, last};
  taken_ += size;
  uncut_ = 0;
  begun_ = !last;
  if (last) {
    ended_ = false;
    ++document_;
  }
  return true;
}

void DocumentReader::skip_to(std::size_t input, std::int64_t document) {
  for (; input_ < std::min(input, files_.size()); ++input_) bytes_before_ += fs::file_size(files_[input_]);
  if (document == 0) return;
  if (input < files_.size()) open_ = open_documents(files_[input], format_);
  FileDocuments::Chunk chunk;
  while (document_ < document) {
    if (open_ == nullptr || !open_->next(chunk)) {
      throw Error("data tokenize", "inputs",
                  fmt::format("fewer than {} documents in {}", document,
                              input < files_.size() ? files_[input].string() : "nothing"),
                  "the inputs of the run before");
    }
    document_ += chunk.ends;
  }
}

std::uint64_t DocumentReader::position() const { return bytes_before_ + (open_ == nullptr ? 0 : open_->position()); }

}  // namespace efla::data
