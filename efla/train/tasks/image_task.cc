#include "efla/train/tasks/image_task.h"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/base/fnv1a.h"
#include "efla/eval/robustness.h"
#include "efla/io/fields.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/train/checkpoint.h"
#include "efla/train/data_order.h"

namespace efla::train {
namespace {

using nlohmann::json;

// Returns sixteen hexadecimal digits.
std::string digits_of(std::uint64_t hash) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash));
  return digits.data();
}

const ImageTraining& validated(const ImageTraining& training, const data::ImageSet& images) {
  validate(training);
  if (images.count == 0) throw Error("train", "training images", "none", "at least one");
  return training;
}

}  // namespace

void validate(const ImageTraining& t) {
  const Require require("train");
  require(t.epochs >= 1 && t.epochs <= 1'000'000, "epochs", t.epochs, "1 to 1000000");
  require(t.lr > 0.0 && t.lr <= 1.0, "lr", t.lr, "a number above 0 and at most 1");
  require(t.batch_size >= 1 && t.batch_size <= 65536, "batch_size", t.batch_size, "1 to 65536");
  require(t.weight_decay >= 0.0 && t.weight_decay <= 100.0, "weight_decay", t.weight_decay, "0 to 100");
  require(t.warmup >= 0.0 && t.warmup < 1.0, "warmup", t.warmup, "a part of all steps, at least 0 and below 1");
  require(t.clip >= 0.0 && std::isfinite(t.clip), "clip", t.clip, "a finite norm, or 0 for none");
}

json to_json(const ImageTraining& t) {
  return {{"epochs", t.epochs},
          {"lr", t.lr},
          {"seed", t.seed},
          {"batch_size", t.batch_size},
          {"weight_decay", t.weight_decay},
          {"schedule", schedule_name(t.schedule)},
          {"warmup", t.warmup},
          {"clip", t.clip}};
}

ImageTraining image_training_from_json(const io::Fields& fields) {
  ImageTraining t;
  fields.get_to("epochs", t.epochs);
  fields.get_to("lr", t.lr);
  fields.get_to("seed", t.seed);
  fields.get_to("batch_size", t.batch_size);
  fields.get_to("weight_decay", t.weight_decay);
  const auto schedule = fields.get<std::string>("schedule");
  t.schedule = schedule == schedule_name(Schedule::constant) ? Schedule::constant : Schedule::cosine;
  if (schedule != schedule_name(t.schedule)) fields.refuse("schedule", "constant or cosine");
  fields.get_to("warmup", t.warmup);
  fields.get_to("clip", t.clip);
  return t;
}

json describe(const std::string& source, const data::ImageSet& train, const data::ImageSet& test) {
  std::uint64_t digest = kFnv1aStart;  // distinguishes data sets
  for (const auto* set : {&train, &test}) digest = fnv1a(set->labels, fnv1a(set->pixels, digest));
  return {
      {"source", source}, {"train_images", train.count}, {"test_images", test.count}, {"digest", digits_of(digest)}};
}

ImageTask::ImageTask(MakeClassifier make, const data::ImageSet& train, const data::ImageSet& test,
                     const ImageTraining& training)
    : make_(std::move(make)),
      train_(train),
      test_(test),
      training_(validated(training, train)),
      steps_per_epoch_((train.count + training.batch_size - 1) / training.batch_size) {}

nn::NamedParameters ImageTask::add_copy() {
  copies_.push_back(make_());
  return copies_.back().parameters;
}

LearningRate ImageTask::learning_rate() const {
  return {training_.schedule, training_.lr, /*floor=*/0.0, steps_of(training_.warmup, steps()), steps()};
}

nlohmann::ordered_json ImageTask::progress(std::int64_t step, std::int64_t /*examples*/) const {
  return {{"epoch", (step - 1) / steps_per_epoch_ + 1}};
}

std::int64_t ImageTask::draw(std::int64_t step) {
  const std::int64_t epoch = step / steps_per_epoch_;
  if (order_epoch_ != epoch) {
    order_ = epoch_order(training_.seed, epoch, static_cast<std::uint32_t>(train_.count));
    order_epoch_ = epoch;
  }
  const std::int64_t first = step % steps_per_epoch_ * training_.batch_size;
  const std::int64_t count = std::min(training_.batch_size, train_.count - first);
  batch_ = std::span(order_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  const std::int64_t size = eval::micro_batch(device());
  return (count + size - 1) / size;
}

Part ImageTask::part(std::int64_t i) {
  const auto most = static_cast<std::size_t>(eval::micro_batch(device())), from = static_cast<std::size_t>(i) * most;
  const std::size_t size = std::min(most, batch_.size() - from);
  const eval::Batch images = eval::make_batch(train_, batch_.subspan(from, size), {}, 0, device());
  const torch::Tensor divisor = torch::full({}, normaliser(), torch::kFloat).to(device(), /*non_blocking=*/true);
  const auto count = static_cast<std::int64_t>(size);
  return {{images.pixels, images.labels, divisor}, count, count, normaliser()};
}

PartLoss ImageTask::loss(const std::vector<torch::Tensor>& inputs, int copy) {
  const torch::Tensor logits = copies_[static_cast<std::size_t>(copy)].forward(inputs[0]);
  namespace functional = torch::nn::functional;
  const auto sum = functional::CrossEntropyFuncOptions().reduction(torch::kSum);
  const torch::Tensor objective = functional::cross_entropy(logits, inputs[1], sum) / inputs[2];
  return {objective, objective.detach(), eval::count_correct(logits, inputs[1])};
}

nlohmann::ordered_json ImageTask::evaluate(const DataParallel& model, ProcessGroup& /*group*/,
                                           const StopFunction& stop) {
  const eval::Evaluation measured = eval::evaluate(classifier(), test_, model.pool(), {}, 0, stop);
  return {{"loss", measured.loss}, {"accuracy", measured.accuracy}};
}

UpdateOptions update_options(const ImageTraining& training) {
  return {{.beta2 = 0.999, .weight_decay = training.weight_decay}, training.clip};
}

json description(const ImageRun& run) {
  return {{"model", run.model}, {"data", run.data}, {"training", to_json(run.training)}};
}

void require_image_config(const io::Fields& config) {
  const auto model = config.object("model");
  model.check([&] { validate(nn::pixel_classifier_config_from_json(model.content())); });
  const auto data = config.object("data");
  data.get<std::string>("source");
  for (const char* count : {"train_images", "test_images"}) data.get<std::int64_t>(count);
  const auto training = config.object("training");
  const auto options = image_training_from_json(training);
  training.check([&] { validate(options); });
}

json read_image_config(const std::filesystem::path& checkpoint) {
  json config = read_trainer_state(checkpoint).config;
  const std::string file = trainer_file(checkpoint);
  if (!config.contains(json::json_pointer("/data/train_images"))) {
    throw IoError(IoError::Kind::content, file, -1, "belongs to a run of another command than efla train smnist");
  }
  require_image_config({config, io::refuse_in_file(file), "config"});
  return config;
}

ImageRunResult train_images(const ImageRun& run, const ImageTask::MakeClassifier& make, const data::ImageSet& train,
                            const data::ImageSet& test, ThreadPool& pool, const RunEvents& events,
                            torch::Device device) {
  ImageTask task(make, train, test, run.training);
  DataParallel model(
      device.is_cpu() ? pool.threads() : 1, [&] { return task.add_copy(); }, pool, device);
  const auto alone = ProcessGroup::join({}, torch::kCPU);
  RunOptions options;
  options.evaluate_every = task.steps_per_epoch();
  options.checkpoint_evaluated = true;
  options.checkpoint_every = run.checkpoint_every;
  const RunEnd end = train_in_folder({run.folder, description(run), options}, task, model, update_options(run.training),
                                     *alone, events);
  return {end, task.classifier()};
}

}  // namespace efla::train
