// Reports that a file's content is wrong, and where.
#pragma once

#include <cstdint>
#include <string>

#include "efla/base/error.h"

namespace efla::io {

// Throws IoError(content).
[[noreturn]] inline void fail_in(const std::string& path, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, what);
}

// Throws IoError(content) with the byte offset.
[[noreturn]] inline void fail_at(const std::string& path, std::uint64_t offset, const std::string& what) {
  throw IoError(IoError::Kind::content, path, static_cast<std::int64_t>(offset), what);
}

// Throws IoError(content) with the line, which counts from 1.
[[noreturn]] inline void fail_at_line(const std::string& path, std::int64_t line, const std::string& what) {
  fail_in(path, "line " + std::to_string(line) + ": " + what);
}

}  // namespace efla::io
