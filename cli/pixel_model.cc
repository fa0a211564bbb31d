#include "cli/pixel_model.h"

#include <fmt/core.h>

#include <filesystem>
#include <memory>

#include "efla/base/error.h"
#include "efla/data/digits.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/train/tasks/image_task.h"

namespace efla::cli {
namespace {
constexpr std::int64_t kImageSide = 28;  // PixelClassifierConfig::tokens is its square
}

data::ImageSet load_images(const std::string& source, data::Split split, std::int64_t count) {
  const bool training = split == data::Split::train;
  const std::string option = training ? "--train-images" : "--test-images";
  if (count < 0) throw Error("data", option, std::to_string(count), "a count, or 0 for all");
  if (source == "builtin") {
    const std::int64_t usual = training ? kBuiltinTrainImages : kBuiltinTestImages;
    return data::builtin_digits(split, count == 0 ? usual : count);
  }
  data::ImageSet images = data::load_mnist(source, split);
  if (images.rows != kImageSide || images.cols != kImageSide) {
    throw Error("data", "--data", fmt::format("images of {} x {} pixels in {}", images.rows, images.cols, source),
                fmt::format("{0} x {0}, one token per pixel", kImageSide));
  }
  if (count > images.count) {
    throw Error("data", option, std::to_string(count), "at most the " + std::to_string(images.count) + " in " + source);
  }
  if (count > 0) {
    images.count = count;
    images.pixels.resize(static_cast<std::size_t>(count * images.rows * images.cols));
    images.labels.resize(static_cast<std::size_t>(count));
  }
  return images;
}

PixelData load_pixel_data(const std::string& source, std::int64_t train_images, std::int64_t test_images) {
  PixelData data{
      load_images(source, data::Split::train, train_images), load_images(source, data::Split::test, test_images), {}};
  const std::string recorded =
      source == "builtin" ? source : std::filesystem::absolute(source).lexically_normal().string();
  data.description = train::describe(recorded, data.train, data.test);
  return data;
}

nlohmann::json default_model() { return nn::to_json(nn::PixelClassifierConfig{}); }

eval::Classifier make_classifier(const nlohmann::json& model, std::uint64_t seed) {
  const auto classifier =
      std::make_shared<const nn::PixelClassifier>(nn::pixel_classifier_config_from_json(model), seed);
  return {nn::named_parameters(*classifier),
          [classifier](const torch::Tensor& pixels) { return classifier->forward(pixels); }};
}

}  // namespace efla::cli
