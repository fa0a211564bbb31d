// The sessions of a server as files, between its runs.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/io/folder_lock.h"
#include "efla/serve/engine.h"

namespace efla::cli {

class SessionFolder {
 public:
  // Makes the folder if it does not exist, and locks it. Throws Error if it cannot.
  explicit SessionFolder(std::filesystem::path path);

  // Stores the session of each file NAME.safetensors. Throws Error, IoError.
  void load(serve::Engine& engine);

  // Writes every session to its file and removes the files that `load` read whose sessions were erased. Returns the
  // number of files. Saves all that it can, then throws std::runtime_error with the names of the others.
  std::size_t save(const serve::Engine& engine) const;

 private:
  std::filesystem::path path_;
  io::FolderLock lock_;
  std::vector<std::string> loaded_;
};

}  // namespace efla::cli
