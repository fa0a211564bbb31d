#include "efla/io/idx.h"

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void idx(io::ByteView bytes) {
  constexpr std::size_t kImagesHeader = 16, kLabelsHeader = 8;
  io::IdxImages images;
  if (accepts([&] { images = io::parse_idx_images(bytes, "input"); }, bytes.size())) {
    require(images.count >= 0 && images.rows > 0 && images.cols > 0, "images that have pixels");
    require(images.pixels.size() == bytes.size() - kImagesHeader, "every byte behind the header");
    // No overflow where the number of pixels is that of bytes in memory; without images any size passes.
    require(images.count == 0 ? images.pixels.empty()
                              : images.pixels.size() / std::size_t(images.count) / std::size_t(images.rows) ==
                                    std::size_t(images.cols),
            "as many pixels as the extents say");
  }
  io::Bytes labels;
  if (accepts([&] { labels = io::parse_idx_labels(bytes, "input"); }, bytes.size())) {
    require(labels.size() == bytes.size() - kLabelsHeader, "every byte behind the header");
  }
}

}  // namespace efla::fuzz
