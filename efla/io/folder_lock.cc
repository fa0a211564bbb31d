#include "efla/io/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "efla/io/descriptor.h"
#include "efla/io/file.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::io {
namespace {

namespace fs = std::filesystem;

// Returns, for example, "which process 12 is writing", from the holder's text in the file.
std::string holder_of(const std::string& path) {
  std::istringstream words;
  try {
    constexpr std::size_t kLongest = 4096;
    const auto text = read_file(path, kLongest);
    words.str({text.begin(), text.end()});
  } catch (const IoError&) {  // the holder has just ended, or locked bytes cannot be read
  }
  long process = 0;
  std::string host;
  if (!(words >> process >> host)) return "which another process is writing";
  return fmt::format("which process {}{} is writing", process, host == host_name() ? "" : " on " + printable(host));
}

bool has_no_locks(int error) { return error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK; }

// Returns whether `path` still names the open file. A holder removes the file when it frees the lock.
bool is_at(const std::string& path, int descriptor) {
  struct ::stat named {
  }, opened{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && named.st_ino == opened.st_ino &&
         named.st_dev == opened.st_dev;
}

}  // namespace

FolderLock::FolderLock(const fs::path& folder, std::string_view operation, std::string_view argument)
    : path_((folder / kFile).string()) {
  for (;;) {
    Descriptor file(::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() < 0) throw system_error(path_, "open it for writing");
    int failed = 0;
    do {
      failed = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    } while (failed == EINTR);
    if (failed == EWOULDBLOCK) {
      throw Error(std::string(operation), std::string(argument), folder.string() + ", " + holder_of(path_),
                  "a folder that no other process writes");
    }
    if (failed != 0 && !has_no_locks(failed)) throw system_error(path_, "lock it", failed);
    if (!is_at(path_, file.get())) continue;
    if (::ftruncate(file.get(), 0) != 0) throw system_error(path_, "empty it");
    write_all(file.get(), as_bytes(fmt::format("{} {}\n", ::getpid(), host_name())), path_);
    ::fsync(file.get());  // for the readers of a network file system
    descriptor_ = file.release();
    locks_ = failed == 0;
    return;
  }
}

// Removes the file first: a process that then gets this lock sees that the name is gone and makes a new file.
FolderLock::~FolderLock() {
  if (descriptor_ < 0) return;
  ::unlink(path_.c_str());
  for (const auto& folder : made_) ::rmdir(folder.c_str());
  ::close(descriptor_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      locks_(other.locks_),
      made_(std::move(other.made_)) {}

FolderLock lock_folder(const fs::path& path, std::string_view operation, std::string_view argument) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error == std::errc::not_a_directory || (!error && !fs::is_directory(path))) {
    throw Error(std::string(operation), std::string(argument), path.string(), "a folder");
  }
  if (error) throw system_error(path.string(), "make the folder", error.value());
  return FolderLock(path, operation, argument);
}

void remove_stale_lock(const fs::path& folder) {
  const auto path = folder / FolderLock::kFile;
  const Descriptor file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (file.get() >= 0 && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 && is_at(path, file.get())) {
    ::unlink(path.c_str());
  }
}

bool is_unused_folder(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (name != FolderLock::kFile && !is_temporary_name(name)) return false;
  }
  if (error) throw system_error(folder.string(), "look into the folder", error.value());
  return true;
}

std::vector<fs::path> make_missing_folders(const fs::path& path) {
  std::error_code error;
  std::vector<fs::path> missing, made;
  for (auto folder = path; !folder.empty() && !fs::exists(folder, error); folder = folder.parent_path()) {
    missing.push_back(folder);
  }
  for (auto folder = missing.rbegin(); folder != missing.rend(); ++folder) {
    if (fs::create_directory(*folder, error)) made.insert(made.begin(), *folder);  // false if another process made it
    if (error) throw system_error(path.string(), "make the folder", error.value());
  }
  return made;
}

FolderLock prepare_output_folder(const fs::path& path, std::string_view operation, std::string_view mark) {
  const auto refuse = [&](const std::string& why) {
    throw Error(std::string(operation), "out", why, "a new or empty folder");
  };
  if (path.empty()) refuse("an empty name");
  const auto require_free = [&] {
    if (!(!mark.empty() && fs::exists(path / mark)) && !is_unused_folder(path))
      refuse(path.string() + ", which is not empty");
  };
  std::error_code error;
  const auto status = fs::status(path, error);
  std::vector<fs::path> made;
  if (fs::exists(status)) {
    if (!fs::is_directory(status)) refuse(path.string() + ", which is not a folder");
    // If the folder has a lock's file, the error about the lock comes first. Otherwise a folder that is not free is
    // refused before a lock's file is made in it.
    if (!fs::exists(path / FolderLock::kFile)) require_free();
  } else {
    made = make_missing_folders(path);
  }
  FolderLock lock(path, operation, "out");
  if (lock.locks_) lock.made_ = std::move(made);
  require_free();
  return lock;
}

}  // namespace efla::io
