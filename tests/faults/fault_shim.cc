// A library for LD_PRELOAD in which one call fails (fault_runs.py). The environment chooses the call:
//
//   EFLA_FAULT_CALL    write, fsync, rename, mmap, read or allocation
//   EFLA_FAULT_NUMBER  which of these calls fails, from 1 on; 0: none, and calls of every kind are reported
//   EFLA_FAULT_FOLDER  counts calls on files in this folder, and allocations after the first such call
//   EFLA_FAULT_BYTES   the size from which allocations count
//   EFLA_FAULT_REPORT  a file, to which the name of the call that fails is appended as a line
//
// The functions call the kernel and glibc's allocator directly, because a search for the next definition allocates.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string_view>

extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
}

namespace {

constexpr std::string_view kWrite = "write", kFsync = "fsync", kRename = "rename", kMmap = "mmap", kRead = "read",
                           kAllocation = "allocation";

std::string_view variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

// The choice of the environment. Its values are in place before main, and before the process has other threads.
struct Plan {
  std::string_view call, folder, report;  // no folder: no call counts
  long number = 0;
  std::size_t bytes = 0;
};
Plan plan;
std::atomic<long> calls{0};          // of the chosen kind
std::atomic<bool> has_begun{false};  // whether there was a call on a file of the folder

__attribute__((constructor)) void read_plan() {
  plan.call = variable("EFLA_FAULT_CALL");
  plan.report = variable("EFLA_FAULT_REPORT");
  plan.number = atol(variable("EFLA_FAULT_NUMBER").data());
  plan.bytes = static_cast<std::size_t>(atol(variable("EFLA_FAULT_BYTES").data()));
  plan.folder = variable("EFLA_FAULT_FOLDER");
}

void report(std::string_view call) {
  const auto file = static_cast<int>(
      syscall(SYS_openat, AT_FDCWD, plan.report.data(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  char line[16];
  std::memcpy(line, call.data(), call.size());
  line[call.size()] = '\n';
  syscall(SYS_write, file, line, call.size() + 1);
  syscall(SYS_close, file);
}

// Counts a call. Returns whether it fails.
bool counted(std::string_view call) {
  const bool fails = plan.number > 0 && call == plan.call && calls.fetch_add(1) + 1 == plan.number;
  if (fails || plan.number == 0) report(call);
  return fails;
}

bool is_in_folder(std::string_view path) {
  return !plan.folder.empty() && path.starts_with(plan.folder) && path.substr(plan.folder.size()).starts_with('/');
}

// Returns the path of an open file in `buffer`.
std::string_view path_of(int file, char (&buffer)[PATH_MAX]) {
  char link[32];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const long length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, sizeof(buffer));
  return {buffer, static_cast<std::size_t>(length < 0 ? 0 : length)};
}

// Returns whether a call on a file fails.
bool fails(std::string_view call, int file) {
  char buffer[PATH_MAX];
  if (plan.folder.empty() || file < 0 || !is_in_folder(path_of(file, buffer))) return false;
  has_begun = true;
  return counted(call);
}

bool allocation_fails(std::size_t bytes) { return has_begun && bytes >= plan.bytes && counted(kAllocation); }

// Sets errno and returns the result of a call that fails.
long failure(int error) {
  errno = error;
  return -1;
}

int rename_or_fail(int old_folder, const char* old_path, int folder, const char* path, unsigned flags) {
  if (is_in_folder(path) && counted(kRename)) return static_cast<int>(failure(EIO));
  return static_cast<int>(syscall(SYS_renameat2, old_folder, old_path, folder, path, flags));
}

void* mapping_or_failure(void* address, std::size_t length, int protection, int flags, int file, off_t offset) {
  if (fails(kMmap, file)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

extern "C" {

ssize_t write(int file, const void* data, size_t size) {
  return fails(kWrite, file) ? failure(ENOSPC) : syscall(SYS_write, file, data, size);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  return fails(kWrite, file) ? failure(ENOSPC) : syscall(SYS_writev, file, parts, count);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  return fails(kWrite, file) ? failure(ENOSPC) : syscall(SYS_pwrite64, file, data, size, offset);
}
ssize_t pwrite64(int file, const void* data, size_t size, off_t offset) { return pwrite(file, data, size, offset); }

ssize_t read(int file, void* data, size_t size) {
  return fails(kRead, file) ? failure(EIO) : syscall(SYS_read, file, data, size);
}
ssize_t pread(int file, void* data, size_t size, off_t offset) {
  return fails(kRead, file) ? failure(EIO) : syscall(SYS_pread64, file, data, size, offset);
}
ssize_t pread64(int file, void* data, size_t size, off_t offset) { return pread(file, data, size, offset); }

int fsync(int file) { return static_cast<int>(fails(kFsync, file) ? failure(EIO) : syscall(SYS_fsync, file)); }
int fdatasync(int file) { return static_cast<int>(fails(kFsync, file) ? failure(EIO) : syscall(SYS_fdatasync, file)); }

int rename(const char* old_path, const char* path) noexcept {
  return rename_or_fail(AT_FDCWD, old_path, AT_FDCWD, path, 0);
}
int renameat(int old_folder, const char* old_path, int folder, const char* path) noexcept {
  return rename_or_fail(old_folder, old_path, folder, path, 0);
}
int renameat2(int old_folder, const char* old_path, int folder, const char* path, unsigned flags) noexcept {
  return rename_or_fail(old_folder, old_path, folder, path, flags);
}

void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) noexcept {
  return mapping_or_failure(address, length, protection, flags, file, offset);
}
void* mmap64(void* address, size_t length, int protection, int flags, int file, off_t offset) noexcept {
  return mapping_or_failure(address, length, protection, flags, file, offset);
}

void* malloc(size_t size) noexcept { return allocation_fails(size) ? no_memory() : __libc_malloc(size); }
void* calloc(size_t count, size_t size) noexcept {
  return allocation_fails(count * size) ? no_memory() : __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) noexcept {
  return allocation_fails(size) ? no_memory() : __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) noexcept {
  return allocation_fails(size) ? no_memory() : __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept { return memalign(alignment, size); }
int posix_memalign(void** result, size_t alignment, size_t size) noexcept {
  void* memory = memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *result = memory;
  return 0;
}

}  // extern "C"
