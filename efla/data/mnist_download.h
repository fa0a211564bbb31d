// Downloads MNIST's four files to a folder.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "efla/io/download.h"

namespace efla::data {

// A gzip file to download. The checksum covers the unpacked content, because the packed bytes differ by mirror.
struct RemoteFile {
  std::string_view name;
  std::int64_t unpacked_bytes = 0;
  std::string_view unpacked_sha256;
};

inline constexpr std::string_view kMnistUrl = "https://ossci-datasets.s3.amazonaws.com/mnist/";

inline constexpr std::array<RemoteFile, 4> kMnistFiles{
    {{"train-images-idx3-ubyte.gz", 47'040'016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"},
     {"train-labels-idx1-ubyte.gz", 60'008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"},
     {"t10k-images-idx3-ubyte.gz", 7'840'016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"},
     {"t10k-labels-idx1-ubyte.gz", 10'008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"}}};

struct DownloadEvent {
  enum class Kind { already_there, progress, done } kind = Kind::progress;
  std::string_view name;
  std::int64_t bytes = 0, total = 0;  // packed; total is 0 if the server does not report it
};
using DownloadCallback = std::function<void(const DownloadEvent&)>;

// Downloads each file from base_url + name, unless the folder already holds it with the right content. A file arrives
// as NAME.part, from which a later call resumes, and is renamed when the checksum of its unpacked content is right. A
// file with the wrong content is removed. Throws Error if `folder` is not a folder, and IoError like io::download, also
// for wrong content.
void download_files(const std::filesystem::path& folder, const std::string& base_url, std::span<const RemoteFile> files,
                    const DownloadCallback& callback = {}, const io::DownloadLimits& limits = {});

// Downloads MNIST's four files.
void download_mnist(const std::filesystem::path& folder, const std::string& base_url = std::string(kMnistUrl),
                    const DownloadCallback& callback = {});

}  // namespace efla::data
