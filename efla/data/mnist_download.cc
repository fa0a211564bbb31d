#include "efla/data/mnist_download.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/folder_lock.h"
#include "efla/io/gzip.h"
#include "efla/io/sha256.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

// Incompressible data makes the packed file slightly larger than its content.
constexpr std::int64_t kPackingRoom = 1 << 16;

// Returns why a file is not the expected one; empty if it is.
std::string mismatch(const fs::path& path, const RemoteFile& file) {
  try {
    const auto packed = io::read_file(path);
    const auto content = io::gunzip(packed, path.string(), static_cast<std::size_t>(file.unpacked_bytes));
    const auto sum = io::sha256(content);
    if (sum == file.unpacked_sha256) return "";
    return fmt::format("unpacks to {} bytes with sha256 {}, expected {} bytes with {}", content.size(), sum,
                       file.unpacked_bytes, file.unpacked_sha256);
  } catch (const IoError& error) {
    if (error.kind() != IoError::Kind::content) throw;
    return error.what();
  }
}

bool is_right(const fs::path& path, const RemoteFile& file) { return fs::exists(path) && mismatch(path, file).empty(); }

void fetch(const fs::path& path, const std::string& url, const RemoteFile& file, const DownloadCallback& report,
           const io::DownloadLimits& limits) {
  const fs::path part = path.string() + ".part";
  // A complete part is left if the program ended just before renaming it. There is nothing more to request for it.
  if (!is_right(part, file)) {
    const auto progress = [&](std::int64_t done, std::int64_t total) {
      if (report) report({DownloadEvent::Kind::progress, file.name, done, total});
    };
    io::download(url, part, progress, limits);
    if (const auto why = mismatch(part, file); !why.empty()) {
      fs::remove(part);
      throw IoError(IoError::Kind::system, url, -1, "not the expected file, removed: " + why);
    }
  }
  fs::rename(part, path);
}

}  // namespace

void download_files(const fs::path& folder, const std::string& base_url, std::span<const RemoteFile> files,
                    const DownloadCallback& callback, const io::DownloadLimits& limits) {
  if (folder.empty()) throw Error("download", "out", "an empty name", "a folder");
  std::error_code error;
  const auto status = fs::status(folder, error);
  if (fs::exists(status) && !fs::is_directory(status)) {
    throw Error("download", "out", folder.string() + ", which is not a folder", "a folder");
  }
  const std::string base = base_url.ends_with('/') ? base_url : base_url + "/";
  std::optional<io::FolderLock> lock;  // none for a complete folder, which the user may not be able to write
  if (!fs::exists(status)) lock.emplace(io::prepare_output_folder(folder, "download"));
  for (const auto& file : files) {
    const auto path = folder / file.name;
    auto kind = DownloadEvent::Kind::already_there;
    bool right = is_right(path, file);
    if (!right && !lock) {
      lock.emplace(folder, "download", "out");
      right = is_right(path, file);  // another process may have written the file meanwhile
    }
    if (!right) {
      auto bounded = limits;
      bounded.max_bytes = std::min(limits.max_bytes, file.unpacked_bytes + kPackingRoom);
      fetch(path, base + std::string(file.name), file, callback, bounded);
      kind = DownloadEvent::Kind::done;
    }
    const auto size = static_cast<std::int64_t>(fs::file_size(path));
    if (callback) callback({kind, file.name, size, size});
  }
}

void download_mnist(const fs::path& folder, const std::string& base_url, const DownloadCallback& callback) {
  download_files(folder, base_url, kMnistFiles, callback);
}

}  // namespace efla::data
