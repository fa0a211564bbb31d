// A folder that a command makes as a whole.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "efla/io/file.h"

namespace efla::io {

// Files that belong together: they are written below path() and appear under the folder's own name with commit(), or
// not at all. The same command can be repeated after any failure and after a kill.
class OutputFolder {
 public:
  // Makes the parents of the folder that do not exist. Throws Error(operation, "out", …) for a path that is a file, a
  // folder that is not empty or that another command writes, and the current folder or a mount point, which cannot be
  // replaced.
  OutputFolder(const std::filesystem::path& path, std::string_view operation);
  // Without commit(), removes everything that was made.
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return folder_->path(); }
  void commit() { folder_->commit(); }

 private:
  std::vector<std::filesystem::path> made_;  // parents, the innermost first
  std::optional<AtomicFolder> folder_;
};

}  // namespace efla::io
