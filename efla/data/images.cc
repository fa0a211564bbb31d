#include "efla/data/images.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/content_error.h"
#include "efla/io/idx.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kLabelsHeader = 8;

fs::path find_file(const fs::path& folder, const std::string& name) {
  std::error_code error;
  for (const auto& candidate : {folder / name, folder / (name + ".gz")}) {
    if (fs::exists(candidate, error)) return candidate;
  }
  const bool is_folder = fs::is_directory(folder, error);
  throw IoError(IoError::Kind::missing, folder.string(), -1,
                is_folder ? fmt::format("holds neither {0} nor {0}.gz", name) : "there is no such folder");
}

}  // namespace

ImageSet load_mnist(const fs::path& folder, Split split) {
  const std::string prefix = split == Split::train ? "train" : "t10k";
  const auto images_path = find_file(folder, prefix + "-images-idx3-ubyte");
  const auto labels_path = find_file(folder, prefix + "-labels-idx1-ubyte");
  auto images = io::read_idx_images(images_path);
  auto labels = io::read_idx_labels(labels_path);
  if (images.count == 0) io::fail_in(images_path, "holds no images");
  if (std::cmp_not_equal(labels.size(), images.count)) {
    io::fail_in(labels_path,
                fmt::format("holds {} labels, expected {}, the number of images", labels.size(), images.count));
  }
  const auto bad = std::find_if(labels.begin(), labels.end(), [](auto label) { return label >= kClasses; });
  if (bad != labels.end()) {
    const auto index = static_cast<std::size_t>(bad - labels.begin());
    io::fail_at(labels_path, kLabelsHeader + index, fmt::format("label {} is {}, expected 0 to 9", index, *bad));
  }
  return {images.count, images.rows, images.cols, std::move(images.pixels), std::move(labels)};
}

}  // namespace efla::data
