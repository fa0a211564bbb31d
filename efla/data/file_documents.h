// The documents of one file, as a stream. Used by documents.cc.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "efla/data/documents.h"

namespace efla::data {

class FileDocuments {
 public:
  virtual ~FileDocuments() = default;

  struct Chunk {
    std::string text;   // UTF-8
    bool ends = false;  // the document ends here
  };

  // Reads the next chunk. Returns false after the end of the last document. No document is empty.
  virtual bool next(Chunk& chunk) = 0;

  // Returns the number of bytes of the file that were read.
  virtual std::uint64_t position() const = 0;
};

// Opens JSON lines or text, by the file's name. Throws IoError, here or in next.
std::unique_ptr<FileDocuments> open_documents(const std::filesystem::path& path, const DocumentFormat& format);

}  // namespace efla::data
