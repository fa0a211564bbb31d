// Documents of text files and JSON lines, packed or not, in parts that a tokenizer can take one by one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"

namespace efla::data {

struct DocumentFormat {
  std::string field = "text";               // field of a JSON line that holds the document
  std::string separator = "<|endoftext|>";  // line between two documents of a text file
};

// A part of a document. The ids of all its parts, concatenated, are the ids of the document.
struct DocumentPart {
  std::string text;
  std::size_t input = 0;      // index of the file
  std::int64_t document = 0;  // number in the file, from 0
  bool first = false, last = false;
};

// Returns the input files in the order given. A folder gives every file below it, sorted by the bytes of the paths;
// files and folders whose name starts with a dot are left out. Throws IoError for a file that is missing or not a
// regular one, for a link below a folder that leads to a folder or nowhere, and Error for a folder without files.
std::vector<std::filesystem::path> list_inputs(const std::vector<std::string>& inputs);

// The documents of one file, read as a stream. Used by documents.cc.
class FileDocuments;

// Reads the documents of files. A file that ends in .jsonl, .ndjson or .json has one JSON object per line. Every other
// file is text, with documents separated by a line that equals the separator and may end in CRLF. Both may begin with a
// byte order mark, which belongs to no document, and may be packed with gzip, xz or zstd (then .gz, .xz or .zst
// follows). Everything between two separators belongs to the document, byte for byte; empty documents are skipped.
// Memory: a part, a line of JSON (at most 256 MiB), and text that cannot be cut; more than 700 MB of such text are
// refused. next throws IoError(content) with the file and the byte offset for text that is not UTF-8 or a line that is
// not JSON, and with the line number if the field is missing.
class DocumentReader {
 public:
  // The tokenizer must outlive the reader.
  DocumentReader(std::vector<std::filesystem::path> files, DocumentFormat format, const Tokenizer& tokenizer);
  ~DocumentReader();
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  // Reads the next part. Returns false after the last one.
  bool next(DocumentPart& part);

  // Moves to a document of a file, before the first call of next. Throws Error if the file has fewer documents.
  void skip_to(std::size_t input, std::int64_t document);

  // Returns how many bytes of the files, as stored on disk, were read.
  std::uint64_t position() const;

 private:
  bool read_chunk();
  std::size_t find_cut(std::string_view text);
  bool take_part(DocumentPart& part);

  std::vector<std::filesystem::path> files_;
  DocumentFormat format_;
  const Tokenizer& tokenizer_;
  std::unique_ptr<FileDocuments> open_;
  std::size_t input_ = 0;
  std::int64_t document_ = 0;
  std::uint64_t bytes_before_ = 0;  // size of the files before this one
  std::string pending_;             // text of the current document
  std::size_t taken_ = 0;           // bytes of pending_ that were returned
  std::size_t uncut_ = 0;           // bytes behind taken_ in which no cut was found
  bool begun_ = false, ended_ = false;
};

}  // namespace efla::data
