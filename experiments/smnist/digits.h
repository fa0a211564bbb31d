// Digits read pixel by pixel: the images, and the classifier that reads them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/data/images.h"
#include "efla/eval/classifier.h"

namespace efla::experiments {

struct DigitData {
  data::ImageSet train, test;
  nlohmann::json description;  // train::describe
};

inline constexpr std::int64_t kBuiltinTrainImages = 20'000, kBuiltinTestImages = 2'000;

// Returns the first `count` images of a split. source is "builtin" or a folder with MNIST's files. A count of 0 means
// all images of MNIST, or kBuiltinTrainImages and kBuiltinTestImages drawn ones. Throws Error, naming train_images or
// test_images, for a count below 0 or above the number of images. load_digits throws Error too for a path that is not
// UTF-8, which a description cannot have.
data::ImageSet load_digit_images(const std::string& source, data::Split split, std::int64_t count);
DigitData load_digits(const std::string& source, std::int64_t train_images, std::int64_t test_images);

// Returns the default configuration of the classifier, as JSON.
nlohmann::json default_digit_model();

// Returns the classifier of a configuration (nn::PixelClassifierConfig as JSON) and a seed.
eval::Classifier make_digit_classifier(const nlohmann::json& model, std::uint64_t seed);

}  // namespace efla::experiments
