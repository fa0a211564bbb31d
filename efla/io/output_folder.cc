#include "efla/io/output_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "efla/io/descriptor.h"
#include "efla/io/folder_lock.h"

namespace efla::io {
namespace {

namespace fs = std::filesystem;

bool is_mount_point(const fs::path& folder) {
  struct ::stat own {
  }, parent{};
  return ::stat(folder.c_str(), &own) == 0 && ::stat((folder / "..").c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

// Returns the folder that a new one replaces or becomes, without links and without what a killed process left in it.
fs::path free_folder(const fs::path& path, std::string_view operation) {
  const auto refuse = [&](const std::string& why) {
    throw Error(std::string(operation), "out", why, "a new or empty folder");
  };
  if (path.empty()) refuse("an empty name");
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) {
    const auto absolute = fs::absolute(path).lexically_normal();
    return absolute.has_filename() ? absolute : absolute.parent_path();
  }
  if (!fs::is_directory(status)) refuse(path.string() + ", which is not a folder");
  if (!is_unused_folder(path)) refuse(path.string() + ", which is not empty");
  if (is_mount_point(path) || fs::equivalent(path, ".", error)) {
    refuse(path.string() + ", which is the current folder or a mount point and cannot be replaced");
  }
  const FolderLock lock(path, operation, "out");  // throws while a command writes into it
  remove_stale_temporaries(path);
  return fs::canonical(path);
}

}  // namespace

OutputFolder::OutputFolder(const fs::path& path, std::string_view operation) {
  const auto target = free_folder(path, operation);
  made_ = make_missing_folders(target.parent_path());
  try {
    folder_.emplace(target);
  } catch (...) {
    for (const auto& folder : made_) ::rmdir(folder.c_str());
    throw;
  }
}

OutputFolder::~OutputFolder() {
  folder_.reset();
  for (const auto& folder : made_) ::rmdir(folder.c_str());  // does nothing to a folder that is not empty
}

}  // namespace efla::io
