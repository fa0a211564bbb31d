#include "efla/train/trainer.h"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "efla/autograd/one_thread.h"
#include "efla/base/error.h"
#include "efla/train/checkpoint.h"
#include "efla/train/data_order.h"

namespace efla::train {
namespace {

const TrainOptions& validated(const TrainOptions& options, const data::ImageSet& images) {
  validate(options);
  if (images.count == 0) throw Error("train", "training images", "none", "at least one");
  return options;
}

}  // namespace

Trainer::Trainer(const Classifier& classifier, const data::ImageSet& images, const TrainOptions& options,
                 ThreadPool& pool)
    : classifier_(classifier),
      images_(images),
      options_(validated(options, images)),
      pool_(pool),
      parameters_(classifier.parameters, torch::kCPU),
      gradient_(tensors_of(classifier.parameters), pool),
      optimizer_(parameters_, {.beta2 = 0.999, .weight_decay = options.weight_decay}, {0, parameters_.size()}),
      steps_per_epoch_((images.count + options.batch_size - 1) / options.batch_size) {}

StepResult Trainer::step() {
  autograd::compute_on_this_thread_only();
  const std::int64_t epoch = step_ / steps_per_epoch_;
  if (order_epoch_ != epoch) {
    order_ = epoch_order(options_.seed, epoch, static_cast<std::uint32_t>(images_.count));
    order_epoch_ = epoch;
  }
  const std::int64_t first = step_ % steps_per_epoch_ * options_.batch_size;
  const std::int64_t count = std::min(options_.batch_size, images_.count - first);
  const std::span<const std::uint32_t> batch(order_.data() + first, static_cast<std::size_t>(count));

  const std::int64_t parts = (count + kMicroBatch - 1) / kMicroBatch;
  std::vector<std::int64_t> correct(parts);
  const double loss = gradient_.compute(parts, [&](std::int64_t part) {
    const auto from = static_cast<std::size_t>(part * kMicroBatch);
    const Batch images = make_batch(images_, batch.subspan(from, std::min<std::size_t>(kMicroBatch, count - from)));
    const torch::Tensor logits = classifier_.forward(images.pixels);
    correct[part] = count_correct(logits, images.labels);
    namespace functional = torch::nn::functional;
    const auto sum = functional::CrossEntropyFuncOptions().reduction(torch::kSum);
    return functional::cross_entropy(logits, images.labels, sum) / static_cast<double>(count);
  });

  StepResult result{step_ + 1, epoch + 1, count, loss, 0.0, 0.0, gradient_.norm(), false};
  for (const std::int64_t n : correct) result.accuracy += static_cast<double>(n) / static_cast<double>(count);
  result.lr = learning_rate(options_.schedule, options_.lr, options_.warmup, step_, total_steps());
  if (!std::isfinite(loss) || !std::isfinite(result.grad_norm)) return result;
  optimizer_.step(gradient_.gradient(), clip_factor(result.grad_norm, options_.clip), result.lr, pool_);
  result.updated = true;
  ++step_;
  return result;
}

void Trainer::save(const std::filesystem::path& path, const nlohmann::json& run) const {
  write_checkpoint(path, parameters_, optimizer_, step_, run);
}

void Trainer::restore(const std::filesystem::path& path, const nlohmann::json& run) {
  const Checkpoint checkpoint(path);
  require_same(run, checkpoint.run(), "resume", path.string());
  checkpoint.read_parameters(classifier_.parameters);
  checkpoint.read_moments(parameters_, optimizer_);
  step_ = checkpoint.step();
  order_epoch_ = -1;
}

}  // namespace efla::train
