// Reports the place at which a file's content is wrong.
#pragma once

#include <cstdint>
#include <string>

#include "efla/base/error.h"

namespace efla::io {

// Throws IoError(content) with the byte offset.
[[noreturn]] inline void fail_at(const std::string& path, std::uint64_t offset, const std::string& what) {
  throw IoError(IoError::Kind::content, path, static_cast<std::int64_t>(offset), what);
}

}  // namespace efla::io
