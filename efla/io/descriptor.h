// An owned POSIX file descriptor, errno as an exception, and this machine's name.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <unistd.h>

#include "efla/base/error.h"
#include "efla/io/file.h"

namespace efla::io {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Returns the error "cannot WHAT: Permission denied" for an errno; its kind is missing if the file does not exist.
inline IoError system_error(const std::string& path, const std::string& what, int error = errno) {
  const auto kind = error == ENOENT || error == ENOTDIR ? IoError::Kind::missing : IoError::Kind::system;
  return IoError(kind, path, -1, "cannot " + what + ": " + std::strerror(error));
}

// Returns the name of this machine.
std::string host_name();

// Writes all of the bytes at the descriptor's position. path is for messages.
void write_all(int fd, ByteView bytes, const std::string& path);

}  // namespace efla::io
