// The exceptions of the libraries. The program's main alone turns them into messages and exit codes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace efla {

// A bad argument: which operation, which argument as the library names it, what was got, what was expected. Exit
// code 2.
class Error : public std::runtime_error {
 public:
  Error(std::string operation, std::string argument, std::string got, std::string expected);

  const std::string& operation() const { return operation_; }
  const std::string& argument() const { return argument_; }
  const std::string& got() const { return got_; }
  const std::string& expected() const { return expected_; }

 private:
  std::string operation_, argument_, got_, expected_;
};

// A bad field of a JSON object in a file or a request. The program does not replace the field's name by an option of
// the command, even if an option has this name.
class FieldError : public Error {
 public:
  using Error::Error;
};

// A file that cannot be read or written: its path, the byte offset of the problem (−1: none), and the reason.
class IoError : public std::runtime_error {
 public:
  // Kind::content: the bytes do not follow the format (the user's file, exit code 2).
  // Kind::missing: no such file (exit code 2). Kind::system: the operating system refused (exit code 1).
  enum class Kind { content, missing, system };

  IoError(Kind kind, std::string path, std::int64_t offset, std::string what);

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  std::int64_t offset() const { return offset_; }

 private:
  Kind kind_;
  std::string path_;
  std::int64_t offset_;
};

// Returns whether a message of LibTorch, cuBLAS or CUDA says that a GPU has too little memory.
bool says_no_gpu_memory(std::string_view message);

}  // namespace efla
