// Grey images with labels: MNIST from a folder, in its own format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace efla::data {

inline constexpr int kClasses = 10;

enum class Split { train, test };

struct ImageSet {
  std::int64_t count = 0, rows = 0, cols = 0;
  std::vector<std::uint8_t> pixels;  // [count, rows, cols]; 0 is background, 255 full ink
  std::vector<std::uint8_t> labels;  // [count], below kClasses
};

// Reads train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-… for the test split, each plain or with .gz; the
// plain file if both exist. Throws IoError: missing, with the names that were tried; content, for a broken or empty
// file, counts that differ, or a label above 9.
ImageSet load_mnist(const std::filesystem::path& folder, Split split);

}  // namespace efla::data
