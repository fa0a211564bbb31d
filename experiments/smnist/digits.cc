#include "experiments/smnist/digits.h"

#include <filesystem>
#include <memory>

#include "efla/base/error.h"
#include "efla/base/memory.h"
#include "efla/base/utf8.h"
#include "efla/data/digits.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/train/tasks/image_task.h"

namespace efla::experiments {
namespace {

constexpr std::int64_t kImageSide = 28;  // PixelClassifierConfig::tokens is its square

std::string size_text(std::int64_t rows, std::int64_t columns) {
  return std::to_string(rows) + " x " + std::to_string(columns);
}

}  // namespace

data::ImageSet load_digit_images(const std::string& source, data::Split split, std::int64_t count) {
  const bool training = split == data::Split::train;
  const std::string argument = training ? "train_images" : "test_images";
  if (count < 0) throw Error("data", argument, std::to_string(count), "a count, or 0 for all");
  if (source == "builtin") {
    if (count == 0) count = training ? kBuiltinTrainImages : kBuiltinTestImages;
    if (count > data::kMostDigits) {
      throw Error("data", argument, std::to_string(count),
                  "at most the " + std::to_string(data::kMostDigits) + " built in");
    }
    require_memory("data", argument.c_str(), "images", static_cast<double>(count) * kImageSide * kImageSide);
    return data::builtin_digits(split, count);
  }
  data::ImageSet images = data::load_mnist(source, split);
  if (images.rows != kImageSide || images.cols != kImageSide) {
    throw Error("data", "data", "images of " + size_text(images.rows, images.cols) + " pixels in " + source,
                size_text(kImageSide, kImageSide) + ", one token per pixel");
  }
  if (count > images.count) {
    throw Error("data", argument, std::to_string(count),
                "at most the " + std::to_string(images.count) + " in " + source);
  }
  if (count > 0) {
    images.count = count;
    images.pixels.resize(static_cast<std::size_t>(count * images.rows * images.cols));
    images.labels.resize(static_cast<std::size_t>(count));
  }
  return images;
}

DigitData load_digits(const std::string& source, std::int64_t train_images, std::int64_t test_images) {
  const std::string recorded =
      source == "builtin" ? source : std::filesystem::absolute(source).lexically_normal().string();
  if (utf8_prefix(recorded) != recorded.size()) throw Error("data", "data", recorded, "a path that is UTF-8");
  DigitData data{load_digit_images(source, data::Split::train, train_images),
                 load_digit_images(source, data::Split::test, test_images),
                 {}};
  data.description = train::describe(recorded, data.train, data.test);
  return data;
}

nlohmann::json default_digit_model() { return nn::to_json(nn::PixelClassifierConfig{}); }

eval::Classifier make_digit_classifier(const nlohmann::json& model, std::uint64_t seed) {
  const auto classifier =
      std::make_shared<const nn::PixelClassifier>(nn::pixel_classifier_config_from_json(model), seed);
  return {nn::named_parameters(*classifier),
          [classifier](const torch::Tensor& pixels) { return classifier->forward(pixels); }};
}

}  // namespace efla::experiments
