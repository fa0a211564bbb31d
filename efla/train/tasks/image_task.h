// Training a classifier of images.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "efla/data/images.h"
#include "efla/eval/classifier.h"
#include "efla/io/fields.h"
#include "efla/train/run.h"
#include "efla/train/task.h"

namespace efla::train {

struct ImageTraining {
  std::int64_t epochs = 5;
  double lr = 3e-3;
  std::uint64_t seed = 1;  // of the initial parameters and of the order of the images
  std::int64_t batch_size = 128;
  double weight_decay = 0.01;  // AdamW's, for parameters for which weight_decays is true
  Schedule schedule = Schedule::cosine;
  double warmup = 0.05;  // the fraction of all steps over which the learning rate rises
  double clip = 1.0;     // largest gradient norm; 0 does not clip
};

// Throws Error, naming the option, where a value is out of range.
void validate(const ImageTraining& training);

nlohmann::json to_json(const ImageTraining& training);
// Reads what to_json returns, and refuses a field that is missing or of another type.
ImageTraining image_training_from_json(const io::Fields& fields);

// Returns {"source": …, "train_images": n, "test_images": n, "digest": sixteen hexadecimal digits of all pixels and
// labels}.
nlohmann::json describe(const std::string& source, const data::ImageSet& train, const data::ImageSet& test);

// The mean cross-entropy of batches in the order of epoch_order; the last batch of an epoch is smaller where the batch
// size does not divide the number of images. An evaluation is loss and accuracy on the test images.
class ImageTask : public Task {
 public:
  using MakeClassifier = std::function<eval::Classifier()>;

  // The sets must outlive the task; `make` makes a copy of the classifier. Throws Error for options out of range and
  // for an empty training set.
  ImageTask(MakeClassifier make, const data::ImageSet& train, const data::ImageSet& test,
            const ImageTraining& training);

  std::int64_t steps_per_epoch() const { return steps_per_epoch_; }
  // The first copy.
  const eval::Classifier& classifier() const { return copies_.front(); }

  nn::NamedParameters add_copy() override;
  std::int64_t steps() const override { return training_.epochs * steps_per_epoch_; }
  LearningRate learning_rate() const override;
  std::string unit() const override { return "images"; }
  bool counts_correct() const override { return true; }
  nlohmann::ordered_json progress(std::int64_t step, std::int64_t examples) const override;
  std::int64_t draw(std::int64_t step) override;
  double normaliser() const override { return static_cast<double>(batch_.size()); }
  Part part(std::int64_t i) override;
  PartLoss loss(const std::vector<torch::Tensor>& inputs, int copy) override;
  bool repeats() const override { return true; }
  nlohmann::ordered_json evaluate(const DataParallel& model, ProcessGroup& group, const StopFunction& stop) override;

 private:
  torch::Device device() const { return nn::device_of(copies_.front().parameters); }

  MakeClassifier make_;
  const data::ImageSet& train_;
  const data::ImageSet& test_;
  ImageTraining training_;
  std::int64_t steps_per_epoch_;
  std::vector<eval::Classifier> copies_;
  std::int64_t order_epoch_ = -1;         // epoch of order_, from 0
  std::vector<std::uint32_t> order_;      // [images]
  std::span<const std::uint32_t> batch_;  // of the step that was drawn
};

// Returns what the optimiser takes from the options.
UpdateOptions update_options(const ImageTraining& training);

// A run of train_in_folder with an ImageTask, evaluated and saved after every epoch.
struct ImageRun {
  std::filesystem::path folder;  // exists
  nlohmann::json model, data;    // the classifier's configuration, and `describe` of the images
  ImageTraining training;
  std::int64_t checkpoint_every = 0;  // steps, besides the epochs' ends. Does not change the results
};

// Returns {"model": …, "data": …, "training": …}: what a checkpoint must agree on to be resumed.
nlohmann::json description(const ImageRun& run);

// Throws for a configuration that `description` would not have returned for a PixelClassifier.
void require_image_config(const io::Fields& config);

// Reads the configuration of a checkpoint. Throws IoError(content) if it is not one of a PixelClassifier.
nlohmann::json read_image_config(const std::filesystem::path& checkpoint);

struct ImageRunResult {
  RunEnd end = RunEnd::finished;
  eval::Classifier classifier;
};

// Trains copies of the classifier that `make` makes: one per thread of the pool, or one on a GPU.
ImageRunResult train_images(const ImageRun& run, const ImageTask::MakeClassifier& make, const data::ImageSet& train,
                            const data::ImageSet& test, ThreadPool& pool, const RunEvents& events,
                            torch::Device device = torch::kCPU);

}  // namespace efla::train
