#include "efla/data/images.h"

#include <algorithm>

#include "efla/io/gzip.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void images(io::ByteView bytes) {
  static const ScratchFolder folder;
  if (bytes.size() < 2) return;
  const auto size = std::min<std::size_t>(bytes[0] << 8 | bytes[1], bytes.size() - 2);
  folder.write("t10k-images-idx3-ubyte", bytes.subspan(2, size));
  folder.write("t10k-labels-idx1-ubyte", bytes.subspan(2 + size));
  data::ImageSet set;
  // Offsets count unpacked bytes.
  if (!accepts([&] { set = data::load_mnist(folder.path(), data::Split::test); }, SIZE_MAX)) return;
  require(set.count > 0 && set.rows > 0 && set.cols > 0, "images that have pixels");
  require(set.pixels.size() == std::size_t(set.count) * std::size_t(set.rows) * std::size_t(set.cols), "every pixel");
  require(set.labels.size() == std::size_t(set.count), "a label an image");
  const auto is_class = [](std::uint8_t label) { return label < data::kClasses; };
  require(std::all_of(set.labels.begin(), set.labels.end(), is_class), "labels that are classes");
}

}  // namespace efla::fuzz
