// A lock on a folder that one process writes, and the folders that commands write.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace efla::io {

// Keeps other processes from writing a folder. The kernel holds the lock (flock) on the file .efla-lock in the folder,
// so the end of the process frees it, whatever ended the process. The file holds the process id and the host name, and
// the destructor removes it. Only a process that was killed leaves the file, and a file that nobody locks does not
// count. A program that this process starts does not inherit the lock; a fork of this process does. Where the file
// system has no locks, the folder is used without one.
class FolderLock {
 public:
  static constexpr const char* kFile = ".efla-lock";

  // Locks a folder that exists. Throws Error(operation, argument, …) with the process id of the holder where another
  // FolderLock holds the folder, and IoError where the file cannot be made.
  FolderLock(const std::filesystem::path& folder, std::string_view operation, std::string_view argument);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  friend FolderLock prepare_output_folder(const std::filesystem::path& path, std::string_view operation,
                                          std::string_view mark);

  std::string path_;
  int descriptor_ = -1;
  bool locks_ = false;                       // the file system has locks
  std::vector<std::filesystem::path> made_;  // the destructor removes them if they are empty, the innermost first
};

// Makes the folder and its parents if they do not exist, and locks it. Throws Error(operation, argument, …) for a path
// that is or leads to a file, else as FolderLock does.
[[nodiscard]] FolderLock lock_folder(const std::filesystem::path& path, std::string_view operation,
                                     std::string_view argument);

// Removes the file of a lock that a killed process left in a folder, for commands that find their work done and write
// nothing. Does nothing where a process holds the lock, or where this process may not remove the file.
void remove_stale_lock(const std::filesystem::path& folder);

// Returns whether a folder is empty, apart from files that AtomicFile and FolderLock of a killed process left.
bool is_unused_folder(const std::filesystem::path& folder);

// Makes the folder and its parents unless they exist. Returns the folders that it made, the innermost first.
std::vector<std::filesystem::path> make_missing_folders(const std::filesystem::path& path);

// Makes the folder and its parents, or accepts a folder that is empty or holds the file `mark`, and locks the folder.
// Files that AtomicFile and FolderLock of a killed process left do not count. Throws Error(operation, "out", …) for
// anything else, with nothing written. The lock's destructor removes folders that this function made and that are still
// empty, as after an error.
[[nodiscard]] FolderLock prepare_output_folder(const std::filesystem::path& path, std::string_view operation,
                                               std::string_view mark = "");

}  // namespace efla::io
