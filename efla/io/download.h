// HTTP downloads through libcurl.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace efla::io {

struct DownloadLimits {
  std::int64_t max_bytes = std::int64_t{1} << 40;
  int connect_seconds = 15;
  int stall_seconds = 30;  // without a byte
};

// Bytes on the disk so far and in all (0: not known).
using DownloadProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// Brings an http or https address to a file; bytes that are there already are taken for its beginning, and the server
// is asked for the rest. A server that cannot continue sends all of it again. What had arrived stays when it fails, so
// that the next call goes on from there. Throws IoError with the address for its path: what the server answered, that
// it cannot be reached, that it went silent, or that there is more than max_bytes; or with the file's for the disk.
void download(const std::string& url, const std::filesystem::path& file, const DownloadProgress& progress = {},
              const DownloadLimits& limits = {});

}  // namespace efla::io
