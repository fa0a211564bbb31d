// What every reader promises, whatever the bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include <unistd.h>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/io/file.h"

namespace efla::fuzz {

inline void require(bool kept, const std::string& promise) {
  if (!kept) throw std::logic_error("broken promise: " + promise);
}

// Calls read; true if it took the bytes. Refusing them it must say so by a content error that fits one line of a
// terminal, with an offset that is −1 or at most end.
template <class Read>
bool accepts(const Read& read, std::uint64_t end) {
  try {
    read();
    return true;
  } catch (const IoError& error) {
    const std::string_view message = error.what();
    require(error.kind() == IoError::Kind::content, "an error of kind content: " + std::string(message));
    require(error.offset() >= -1 && (error.offset() < 0 || std::uint64_t(error.offset()) <= end),
            "an offset within the file: " + std::string(message));
    require(message.size() < 2000, "a message that fits a screen");
    require(printable(message) == message, "a message of one line, without escapes");
    return false;
  }
}

// A folder for readers that want a file, the same for every input of a process.
class ScratchFolder {
 public:
  ScratchFolder() {
    // Memory, where there is such a file system: a fuzzer writes thousands of files a second.
    const std::filesystem::path memory = "/dev/shm";
    const auto parent = std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path();
    std::string pattern = (parent / "efla-fuzz-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder: " + pattern);
    path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  std::filesystem::path write(std::string_view name, io::ByteView bytes) const {
    const auto path = path_ / name;
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path.string());
    return path;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace efla::fuzz
