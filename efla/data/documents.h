// Documents of text files and JSON lines, packed or not, in parts that a tokenizer takes one by one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "efla/data/tokenizer.h"

namespace efla::data {

struct DocumentFormat {
  std::string field = "text";               // of a line of JSON
  std::string separator = "<|endoftext|>";  // the line between two documents of a text file
};

// A stretch of a document: the ids of all its parts, one after the other, are those of the document.
struct DocumentPart {
  std::string text;
  std::size_t input = 0;      // index of the file
  std::int64_t document = 0;  // number in the file, from 0
  bool first = false, last = false;
};

// The files that are meant: those named, and for a folder every file below it whose name does not begin with a dot, in
// the order of their paths' bytes. Throws IoError for one that does not exist, and Error for a folder without files.
std::vector<std::filesystem::path> list_inputs(const std::vector<std::string>& inputs);

// The documents of one file, read as a stream; for documents.cc.
class FileDocuments;

// Files ending in .jsonl or .ndjson hold a JSON object a line; all others text, documents apart by a line that is
// exactly the separator. Either may be packed with gzip, xz or zstd (and end in .gz, .xz or .zst behind that).
// Everything between two separators is the document's, byte for byte; one without a byte is left out. Memory: a part, a
// line of JSON, and what cannot be cut; more than 64 MiB of that is refused. next throws IoError(content) with the file
// and the byte offset for text that is not UTF-8 or a line that is not JSON, and with the line's number for one without
// the field.
class DocumentReader {
 public:
  // The tokenizer must outlive it.
  DocumentReader(std::vector<std::filesystem::path> files, DocumentFormat format, const Tokenizer& tokenizer);
  ~DocumentReader();
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  // False after the last part.
  bool next(DocumentPart& part);

  // Before the first next: goes to a document of a file. Throws Error where the file has fewer.
  void skip_to(std::size_t input, std::int64_t document);

  // Bytes of the files that were read.
  std::uint64_t position() const;

 private:
  bool read_chunk();
  bool take_part(DocumentPart& part);

  std::vector<std::filesystem::path> files_;
  DocumentFormat format_;
  const Tokenizer& tokenizer_;
  std::unique_ptr<FileDocuments> open_;
  std::size_t input_ = 0;
  std::int64_t document_ = 0;
  std::uint64_t bytes_before_ = 0;  // of the files before this one
  std::string pending_;             // text of the document at hand
  std::size_t taken_ = 0;           // of pending_
  std::size_t uncut_ = 0;           // bytes behind taken_ that are known to have no cut
  bool begun_ = false, ended_ = false;
};

}  // namespace efla::data
