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
  int stall_seconds = 30;  // time without a byte after which a download fails
};

// Gets the bytes on disk so far and the total (0: unknown).
using DownloadProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// Downloads an http or https address to a file. Bytes that the file already holds are taken as the beginning of the
// content, and only the rest is requested. A server that cannot resume sends everything again. If the download fails,
// the bytes that arrived stay, so that the next call resumes. Throws IoError: with the address as its path if the
// server refuses, is unreachable, stalls, or sends more than max_bytes; with the file's path if the disk fails.
void download(const std::string& url, const std::filesystem::path& file, const DownloadProgress& progress = {},
              const DownloadLimits& limits = {});

}  // namespace efla::io
