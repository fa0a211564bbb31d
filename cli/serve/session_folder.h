// The sessions of a server as files, between its runs.
#pragma once

#include <cstddef>
#include <filesystem>

#include "efla/serve/engine.h"

namespace efla::cli {

class SessionFolder {
 public:
  // Makes the folder if it does not exist. Throws Error if it cannot.
  explicit SessionFolder(std::filesystem::path path);

  // Stores the session of each file NAME.safetensors. Throws Error, IoError.
  void load(serve::Engine& engine) const;

  // Writes every session to its file and removes the files of sessions that were erased. Returns the number of files.
  std::size_t save(const serve::Engine& engine) const;

 private:
  std::filesystem::path path_;
};

}  // namespace efla::cli
