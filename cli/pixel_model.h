// The images and the classifier of pixel sequences that train, eval and reproduce share.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/data/images.h"
#include "efla/eval/classifier.h"

namespace efla::cli {

struct PixelData {
  data::ImageSet train, test;
  nlohmann::json description;  // train::describe
};

// Returns the first `count` images of a split. source is "builtin" or a folder with MNIST's files; a count of 0 means
// all of MNIST's, or kBuiltinTrainImages and kBuiltinTestImages drawn. Throws Error, naming --train-images or
// --test-images, for a count beyond what there is.
data::ImageSet load_images(const std::string& source, data::Split split, std::int64_t count);
PixelData load_pixel_data(const std::string& source, std::int64_t train_images, std::int64_t test_images);
inline constexpr std::int64_t kBuiltinTrainImages = 20'000, kBuiltinTestImages = 2'000;

// Returns the configuration of the classifier that is trained unless options change it.
nlohmann::json default_model();

// Makes the classifier of a configuration (nn::PixelClassifierConfig as JSON), with the initial values of a seed.
eval::Classifier make_classifier(const nlohmann::json& model, std::uint64_t seed);

}  // namespace efla::cli
