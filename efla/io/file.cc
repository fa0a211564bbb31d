#include "efla/io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <regex>

#include <fmt/format.h>

#include "efla/io/content_error.h"
#include "efla/io/descriptor.h"

namespace efla::io {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kReadStep = std::size_t{1} << 20;
constexpr std::size_t kMostOfAStream = std::size_t{1} << 28;  // bytes of a pipe or a device, which may have no end
constexpr std::size_t kWriteBuffer = std::size_t{1} << 18;
// Linux moves at most 2^31 − 4096 bytes in one call.
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;
constexpr std::string_view kTemporaryMark = ".tmp-";  // in ".NAME.tmp-PROCESS-COUNT"

Descriptor open_to_read(const std::string& path, struct ::stat& status, int flags = 0) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
  if (file.get() < 0) throw system_error(path, "open it");
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "read its size");
  if (S_ISDIR(status.st_mode)) fail_in(path, "is a folder, expected a file");
  return file;
}

[[noreturn]] void throw_too_big(const std::string& path, std::size_t max_bytes) {
  fail_at(path, max_bytes, "more data, expected at most " + std::to_string(max_bytes) + " bytes");
}

// Calls fsync for a folder, without which a rename may be lost. Ignores file systems that cannot fsync a folder, and
// folders that this user may write and not read.
void sync_folder(const fs::path& folder) {
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() < 0) {
    if (errno == EACCES) return;
    throw system_error(folder, "open it");
  }
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL && errno != ENOTSUP) {
    throw system_error(folder, "fsync it");
  }
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// Returns the process of a temporary name ".TARGET.tmp-PROCESS-COUNT", 0 for other names. An empty target stands for
// any.
pid_t process_of_temporary(const std::string& name, const std::string& target) {
  static const std::regex pattern(R"(\.(.+)\.tmp-([1-9][0-9]{0,8})-[0-9]+)");
  std::smatch parts;
  if (!std::regex_match(name, parts, pattern) || (!target.empty() && parts[1] != target)) return 0;
  return std::stoi(parts[2]);
}

bool is_running(pid_t process) { return ::kill(process, 0) == 0 || errno != ESRCH; }

// Removes the temporary folders that AtomicFolders of killed processes left for a target. A folder with this process's
// id is an earlier process's.
void remove_stale_folders(const fs::path& target) {
  const std::string start = fmt::format(".{}{}", target.filename().string(), kTemporaryMark);
  std::error_code error;
  for (fs::directory_iterator entry(folder_of(target), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    pid_t process = 0;
    if (!name.starts_with(start)) continue;
    const auto [rest, failed] = std::from_chars(name.data() + start.size(), name.data() + name.size(), process);
    if (failed != std::errc() || rest != name.data() + name.size() || process <= 0) continue;
    std::error_code ignored;  // the folder may be another user's
    if (process == ::getpid() || !is_running(process)) fs::remove_all(entry->path(), ignored);
  }
}

// Returns the path that a write to `path` changes: the target if `path` is a link.
fs::path resolve_target(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw IoError(IoError::Kind::system, path.string(), -1, "cannot write it: exists and is not a regular file");
  }
  if (!fs::is_symlink(fs::symlink_status(path, error))) return path;
  const auto resolved = fs::weakly_canonical(path, error);
  if (error) throw system_error(path.string(), "follow the link", error.value());
  return resolved;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

void write_all(int fd, ByteView bytes, const std::string& path) {
  while (!bytes.empty()) {
    const auto n = ::write(fd, bytes.data(), std::min(bytes.size(), kMaxTransfer));
    if (n < 0 && errno == EINTR) continue;
    // A write of 0 bytes sets no errno. It is an error, because repeating it might never end.
    if (n <= 0) throw system_error(path, "write to it", n == 0 ? ENOSPC : errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

Bytes read_file(const fs::path& path, std::size_t max_bytes) {
  struct ::stat status {};
  const auto file = open_to_read(path, status);
  if (!S_ISREG(status.st_mode)) max_bytes = std::min(max_bytes, kMostOfAStream);
  // The size is only a hint: a pipe has none, and a file may grow while it is read.
  const auto hint = S_ISREG(status.st_mode) ? static_cast<std::size_t>(status.st_size) : 0;
  if (hint > max_bytes) throw_too_big(path, max_bytes);
  Bytes bytes(hint + 1);
  std::size_t size = 0;
  for (;;) {
    if (size == bytes.size()) bytes.resize(size + std::max(size / 2, kReadStep));
    const auto n = ::read(file.get(), bytes.data() + size, std::min(bytes.size() - size, kMaxTransfer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw system_error(path, "read it");
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
    if (size > max_bytes) throw_too_big(path, max_bytes);
  }
  bytes.resize(size);
  return bytes;
}

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  struct ::stat status {};
  const auto file = open_to_read(path_, status, O_NONBLOCK);  // refuses a pipe instead of waiting for it
  if (!S_ISREG(status.st_mode)) fail_in(path_, "is not a regular file");
  if (status.st_size == 0) return;  // mmap refuses a length of 0
  size_ = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) throw system_error(path_, "map it");
  data_ = static_cast<const std::uint8_t*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

bool is_temporary_name(const std::string& name) { return process_of_temporary(name, "") != 0; }

AtomicFile::AtomicFile(const fs::path& path) : target_(resolve_target(path)) {
  static std::atomic<unsigned> count{0};
  buffer_.reserve(kWriteBuffer);  // before there is a file, because a constructor that throws has no destructor
  const auto folder = folder_of(target_);
  do {
    temporary_ =
        folder / fmt::format(".{}{}{}-{}", target_.filename().string(), kTemporaryMark, ::getpid(), count.fetch_add(1));
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) throw system_error(target_, "create a file in its folder");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(ByteView bytes) {
  if (buffer_.size() + bytes.size() > kWriteBuffer) flush();
  if (bytes.size() > kWriteBuffer) return write_through(bytes);
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

void AtomicFile::overwrite(std::uint64_t offset, ByteView bytes) {
  flush();
  if (::lseek(descriptor_, static_cast<off_t>(offset), SEEK_SET) < 0) throw system_error(target_, "seek in it");
  write_through(bytes);
  if (::lseek(descriptor_, 0, SEEK_END) < 0) throw system_error(target_, "seek in it");
}

void AtomicFile::flush() {
  write_through(buffer_);
  buffer_.clear();
}

void AtomicFile::write_through(ByteView bytes) { write_all(descriptor_, bytes, target_); }

void AtomicFile::commit() {
  flush();
  if (::fsync(descriptor_) != 0) throw system_error(target_, "fsync it");
  // From here on the destructor does nothing, so this function removes the temporary file after a failure. A network
  // file system may report a full disk only in close.
  const int error = ::close(std::exchange(descriptor_, -1)) != 0 ? errno : 0;
  if (error == 0 && ::rename(temporary_.c_str(), target_.c_str()) == 0) return sync_folder(folder_of(target_));
  const auto failure =
      system_error(target_, error != 0 ? "write to it" : "rename it into place", error ? error : errno);
  ::unlink(temporary_.c_str());
  throw failure;
}

AtomicFolder::AtomicFolder(const fs::path& path)
    : target_(path),
      temporary_(folder_of(path) / fmt::format(".{}{}{}", path.filename().string(), kTemporaryMark, ::getpid())) {
  remove_stale_folders(target_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) throw system_error(target_, "create a folder beside it");
}

AtomicFolder::~AtomicFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(temporary_, ignored);
}

void AtomicFolder::commit() {
  sync_folder(temporary_);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) throw system_error(target_, "rename it into place");
  committed_ = true;
  try {
    sync_folder(folder_of(target_));
  } catch (const IoError&) {
    committed_ = ::rename(target_.c_str(), temporary_.c_str()) != 0;
    throw;
  }
}

void remove_stale_temporaries(const fs::path& folder, const std::string& name) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto process = process_of_temporary(entry->path().filename().string(), name);
    if (process == 0 || (process != ::getpid() && is_running(process))) continue;
    std::error_code ignored;  // the file may be another user's
    fs::remove(entry->path(), ignored);
  }
}

void write_file_atomically(const fs::path& path, ByteView bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

void write_file_atomically(const fs::path& path, std::string_view text) { write_file_atomically(path, as_bytes(text)); }

}  // namespace efla::io
