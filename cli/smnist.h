// What train, eval and reproduce share: the images, the classifier, threads.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/threads.h"
#include "efla/data/images.h"
#include "efla/train/classifier.h"

namespace efla::cli {

struct SmnistData {
  data::ImageSet train, test;
  nlohmann::json description;  // train::describe
};

// The first so many images of a split. source is "builtin" or a folder with MNIST's files; a count of 0 means all of
// MNIST's, or kBuiltinTrainImages and kBuiltinTestImages drawn. Throws Error, naming --train-images or --test-images,
// for a count beyond what there is.
data::ImageSet load_images(const std::string& source, data::Split split, std::int64_t count);
SmnistData load_smnist(const std::string& source, std::int64_t train_images, std::int64_t test_images);
inline constexpr std::int64_t kBuiltinTrainImages = 20'000, kBuiltinTestImages = 2'000;

// --threads: 0 means every processor. Sets the operators' threads too, and returns the pool that all share.
ThreadPool& use_threads(int threads);
void add_threads_option(CLI::App& command, int& threads);

// The configuration of the classifier of pixel sequences that is trained unless told otherwise, as JSON.
nlohmann::json default_model();

// The classifier of pixel sequences that a configuration (nn::PixelClassifierConfig as JSON) and a seed make.
train::Classifier make_classifier(const nlohmann::json& model, std::uint64_t seed);

// One word of a command line, in quotes where a shell needs them; and the command line of this process.
std::string shell_word(const std::string& word);
std::string command_line();

}  // namespace efla::cli
