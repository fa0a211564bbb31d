// The parts of a training step: order, schedule, gradient, optimiser, perturbations, evaluation.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "efla/eval/robustness.h"
#include "efla/train/checkpoint.h"
#include "efla/train/data_order.h"
#include "efla/train/learning_rate.h"
#include "efla/train/tasks/image_task.h"
#include "efla/train/trainer.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/train/stand_in.h"

namespace efla::train {
namespace {

using eval::Batch;
using eval::Classifier;
using eval::count_correct;
using eval::make_batch;
using eval::measure_robustness;
using eval::Perturbation;
using eval::robustness_panels;
using nlohmann::json;
using test::expect_error;
using test::parameter_bytes;
using test::small_classifier;
using test::small_images;

TEST(DataOrder, IsAPermutationOfItsOwnForEverySeedAndEpoch) {
  const auto order = epoch_order(1, 0, 1000);
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::uint32_t> expected(1000);
  std::iota(expected.begin(), expected.end(), 0U);
  EXPECT_EQ(sorted, expected);
  EXPECT_EQ(order, epoch_order(1, 0, 1000));
  EXPECT_NE(order, epoch_order(1, 1, 1000));
  EXPECT_NE(order, epoch_order(2, 0, 1000));
  std::int64_t in_place = 0;  // one is expected
  for (std::uint32_t i = 0; i < 1000; ++i) in_place += order[i] == i;
  EXPECT_LT(in_place, 10);
  EXPECT_EQ(epoch_order(1, 0, 1), std::vector<std::uint32_t>{0});
}

TEST(Schedule, RisesThenFallsToZeroOrStays) {
  const auto rate = [](Schedule schedule, std::int64_t warmup, std::int64_t step, std::int64_t steps) {
    return LearningRate{schedule, 2.0, 0.0, warmup, steps}.at(step);
  };
  const auto cosine = [&](std::int64_t step) { return rate(Schedule::cosine, steps_of(0.1, 100), step, 100); };
  EXPECT_DOUBLE_EQ(cosine(0), 0.2);
  EXPECT_DOUBLE_EQ(cosine(9), 2.0);
  EXPECT_DOUBLE_EQ(cosine(10), 2.0);
  EXPECT_DOUBLE_EQ(cosine(55), 1.0);
  EXPECT_GT(cosine(99), 0.0);
  EXPECT_LT(cosine(99), 0.001);
  EXPECT_DOUBLE_EQ(rate(Schedule::constant, 10, 4, 100), 1.0);
  EXPECT_DOUBLE_EQ(rate(Schedule::constant, 10, 99, 100), 2.0);
  EXPECT_DOUBLE_EQ(rate(Schedule::cosine, 0, 0, 1), 2.0);
}

// A task with the copies of its model, on threads of its own.
struct Training {
  Training(ImageTask::MakeClassifier make, const data::ImageSet& images, const ImageTraining& options, int threads = 1)
      : Training(std::move(make), images, options, update_options(options), threads) {}
  Training(ImageTask::MakeClassifier make, const data::ImageSet& images, const ImageTraining& options,
           const UpdateOptions& update, int threads)
      : pool(threads),
        task(std::move(make), images, images, options),
        model(
            threads, [this] { return task.add_copy(); }, pool),
        trainer(task, model, update, *group) {}

  ThreadPool pool;
  std::unique_ptr<ProcessGroup> group = ProcessGroup::join({}, torch::kCPU);
  ImageTask task;
  DataParallel model;
  Trainer trainer;
};

Classifier first_classifier() { return small_classifier(1); }

TEST(Trainer, UpdatesByTheClippedGradientOfTheWholeBatch) {
  const auto images = small_images(21, 3);
  std::vector<std::uint32_t> indices(21);
  std::iota(indices.begin(), indices.end(), 0U);
  const auto whole = small_classifier(1);
  const Batch batch = make_batch(images, indices);
  const auto loss = torch::nn::functional::cross_entropy(whole.forward(batch.pixels), batch.labels);
  loss.backward();
  double squares = 0.0;
  for (const auto& [name, tensor] : whole.parameters) {
    if (tensor.grad().defined()) squares += tensor.grad().pow(2).sum().item<double>();
  }
  const double norm = std::sqrt(squares);
  ImageTraining options;
  options.batch_size = 21;  // three parts, the last of which is smaller
  for (const double clip : {0.0, 0.01, 100.0}) {
    // Without a memory of its own AdamW's first moment is the gradient.
    Training training(first_classifier, images, options, {{.beta1 = 0.0}, clip}, /*threads=*/2);
    const StepResult result = training.trainer.step();
    EXPECT_NEAR(result.loss, loss.item<double>(), 1e-6);
    EXPECT_NEAR(result.grad_norm, norm, 1e-5) << "the norm is that before clipping";
    const test::TempFolder folder;
    training.trainer.save(folder.path(), json::object());
    const FlatParameters& parameters = training.model.parameters();
    const auto gradient = torch::empty({parameters.size()}), squared = torch::empty({parameters.size()});
    read_moments(folder.path(), parameters, gradient, squared);
    const double scale = clip == 0.01 ? clip / norm : 1.0;
    for (std::size_t i = 0; i < whole.parameters.size(); ++i) {
      SCOPED_TRACE(whole.parameters[i].first);
      const auto found = parameters.view(gradient, parameters.entries()[i]);
      const auto expected = whole.parameters[i].second.grad();
      if (!expected.defined()) {
        EXPECT_EQ(found.abs().max().item<float>(), 0.0F);
        continue;
      }
      const double error = (found - expected * scale).abs().max().item<double>();
      EXPECT_TRUE(error <= 1e-6) << error;
    }
  }
}

TEST(DataParallel, PassesOnWhatATaskThrows) {
  ThreadPool pool(2);
  const DataParallel model(
      2, [] { return small_classifier(1).parameters; }, pool);
  EXPECT_THROW(model.run(4, [](std::int64_t, int) { throw std::runtime_error("no"); }), std::runtime_error);
}

TEST(FlatAdamW, DecaysMatricesAlone) {
  const auto classifier = small_classifier(1);
  const auto before = small_classifier(1);
  const FlatParameters parameters(classifier.parameters, torch::kCPU);
  FlatAdamW optimizer(parameters, {.weight_decay = 0.5}, {0, parameters.size()});
  ThreadPool pool(1);
  optimizer.step(torch::zeros({parameters.size()}), 1.0, /*lr=*/0.1, pool);
  for (std::size_t i = 0; i < classifier.parameters.size(); ++i) {
    const auto& [name, tensor] = classifier.parameters[i];
    const bool decays = name == "w1" || name == "w2";
    const torch::Tensor expected = before.parameters[i].second.detach() * (decays ? 0.95 : 1.0);
    EXPECT_TRUE(torch::allclose(tensor.detach(), expected, 1e-6, 0.0)) << name;
  }
}

TEST(Trainer, OverfitsOneBatch) {
  const auto images = small_images(16, 5);
  ImageTraining options;
  options.epochs = 300;
  options.batch_size = 16;
  options.lr = 0.02;
  Training training(first_classifier, images, options);
  StepResult result = training.trainer.step();
  EXPECT_GT(result.loss, 1.5);
  while (training.trainer.steps_done() < training.task.steps()) result = training.trainer.step();
  EXPECT_TRUE(result.loss < 0.01) << result.loss;
  EXPECT_EQ(result.accuracy, 1.0);
  EXPECT_EQ(result.step, 300);
  EXPECT_EQ(training.task.progress(result.step, result.examples), nlohmann::ordered_json({{"epoch", 300}}));
}

TEST(Trainer, TakesEveryImageOnceAnEpochAndASmallerLastBatch) {
  const auto images = small_images(21, 5);
  ImageTraining options;
  options.epochs = 2;
  options.batch_size = 8;
  Training training(first_classifier, images, options);
  EXPECT_EQ(training.task.steps_per_epoch(), 3);
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < 6; ++i) sizes.push_back(training.trainer.step().step_examples);
  EXPECT_EQ(training.trainer.examples_done(), 42);
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{8, 8, 5, 8, 8, 5}));
}

TEST(Trainer, LeavesParametersAloneWhereTheLossIsNotFinite) {
  const auto images = small_images(16, 5);
  const auto make = [] {
    auto classifier = small_classifier(1);
    classifier.forward = [forward = classifier.forward](const torch::Tensor& x) {
      return forward(x) * std::numeric_limits<double>::quiet_NaN();
    };
    return classifier;
  };
  Training training(make, images, {});
  EXPECT_FALSE(training.trainer.step().updated);
  EXPECT_EQ(training.trainer.steps_done(), 0);
  EXPECT_EQ(parameter_bytes(training.task.classifier()), parameter_bytes(small_classifier(1)));
}

TEST(Trainer, NamesTheOptionThatIsOutOfRange) {
  const auto images = small_images(16, 5);
  const auto make = [&](auto change) {
    ImageTraining options;
    change(options);
    ImageTask(first_classifier, images, images, options);
  };
  expect_error([&] { make([](auto& o) { o.epochs = 0; }); }, "epochs", "got 0");
  expect_error([&] { make([](auto& o) { o.lr = -1.0; }); }, "lr", "got -1,");
  expect_error([&] { make([](auto& o) { o.lr = std::nan(""); }); }, "lr", "above 0");
  expect_error([&] { make([](auto& o) { o.batch_size = 0; }); }, "batch_size", "1 to 65536");
  expect_error([&] { make([](auto& o) { o.weight_decay = -0.1; }); }, "weight_decay", "got -0.1");
  expect_error([&] { make([](auto& o) { o.warmup = 1.0; }); }, "warmup", "below 1");
  expect_error([&] { make([](auto& o) { o.clip = std::nan(""); }); }, "clip", "finite");
  expect_error([&] { ImageTask(first_classifier, data::ImageSet{}, images, {}); }, "training images", "none");
}

TEST(Perturb, DropoutDropsItsShareAndKeepsTheRest) {
  std::vector<float> pixels(200'000, 0.5F), more = pixels;
  eval::perturb({Perturbation::Kind::dropout, 0.3}, 1, 7, pixels);
  eval::perturb({Perturbation::Kind::dropout, 0.6}, 1, 7, more);
  std::int64_t dropped = 0;
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    ASSERT_TRUE(pixels[i] == 0.0F || pixels[i] == 0.5F);
    dropped += pixels[i] == 0.0F;
    ASSERT_TRUE(pixels[i] != 0.0F || more[i] == 0.0F) << "dropped at 0.3 and not at 0.6";
  }
  EXPECT_NEAR(static_cast<double>(dropped) / 200'000, 0.3, 5 * std::sqrt(0.21 / 200'000));
}

TEST(Perturb, NoiseHasItsMeanAndDeviationAndIsNotClipped) {
  std::vector<float> pixels(200'000, 0.25F), other = pixels;
  eval::perturb({Perturbation::Kind::noise, 0.4}, 1, 7, pixels);
  eval::perturb({Perturbation::Kind::noise, 0.4}, 1, 8, other);
  double sum = 0.0, squares = 0.0, product = 0.0;
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    const double x = pixels[i] - 0.25, y = other[i] - 0.25;
    sum += x, squares += x * x, product += x * y;
  }
  EXPECT_NEAR(sum / 200'000, 0.0, 5 * 0.4 / std::sqrt(200'000));
  EXPECT_NEAR(std::sqrt(squares / 200'000), 0.4, 5 * 0.4 / std::sqrt(400'000));
  EXPECT_NEAR(product / squares, 0.0, 5 / std::sqrt(200'000)) << "two images have the same noise";
  EXPECT_LT(*std::min_element(pixels.begin(), pixels.end()), -1.0F);
  EXPECT_GT(*std::max_element(pixels.begin(), pixels.end()), 1.5F);
}

TEST(Perturb, ScaleMultiplies) {
  std::vector<float> pixels{0.0F, 0.25F, 1.0F};
  eval::perturb({Perturbation::Kind::scale, 16.0}, 1, 7, pixels);
  EXPECT_EQ(pixels, (std::vector<float>{0.0F, 4.0F, 16.0F}));
}

TEST(Evaluate, CountsTiesAndNaNAsWrong) {
  const auto labels = torch::tensor({0, 1, 2, 0}, torch::kInt64);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto logits = torch::tensor({2.0F, 1.0F, 0.0F,  // right
                                     1.0F, 1.0F, 0.0F,  // a tie
                                     0.0F, 1.0F, nan,   // the label's is NaN
                                     9.0F, nan, 0.0F})  // another is NaN
                          .view({4, 3});
  EXPECT_EQ(count_correct(logits, labels).item<std::int64_t>(), 1);
}

TEST(Evaluate, IsThatOfTheWholeSetAndTheSameOnAnyThreads) {
  const auto images = small_images(203, 4);
  const auto classifier = small_classifier(2);
  std::vector<std::uint32_t> indices(203);
  std::iota(indices.begin(), indices.end(), 0U);
  const Batch all = make_batch(images, indices);
  const auto logits = classifier.forward(all.pixels);
  const double loss = torch::nn::functional::cross_entropy(logits, all.labels).item<double>();
  const double accuracy = logits.argmax(1).eq(all.labels).to(torch::kFloat64).mean().item<double>();
  ThreadPool one(1), three(3);
  const eval::Evaluation result = eval::evaluate(classifier, images, one);
  EXPECT_NEAR(result.loss, loss, 1e-6);
  EXPECT_DOUBLE_EQ(result.accuracy, accuracy);
  const Perturbation noise{Perturbation::Kind::noise, 0.2};
  EXPECT_EQ(eval::evaluate(classifier, images, one, noise, 9).loss,
            eval::evaluate(classifier, images, three, noise, 9).loss);
  EXPECT_NE(eval::evaluate(classifier, images, one, noise, 9).loss,
            eval::evaluate(classifier, images, one, noise, 8).loss);
  EXPECT_THROW(eval::evaluate(classifier, images, three, {}, 0, [] { return true; }), Stopped);
}

TEST(Robustness, HasEveryLevelAndTheCleanAccuracyWhereNothingIsDisturbed) {
  const auto images = small_images(100, 4);
  const auto classifier = small_classifier(2);
  ThreadPool pool(2);
  int last = 0, expected = 0;
  const auto result = eval::to_json(measure_robustness(classifier, images, pool, 1, {}, [&](int done, int all) {
    EXPECT_EQ(done, ++last);
    expected = all;
  }));
  EXPECT_EQ(last, expected);
  EXPECT_EQ(expected, 16);
  for (const auto& panel : robustness_panels()) {
    const auto& points = result.at(std::string(panel.name));
    ASSERT_EQ(points.size(), panel.levels.size());
    EXPECT_EQ(points[0]["accuracy"], result["clean_accuracy"]);
    for (std::size_t i = 0; i < points.size(); ++i) {
      EXPECT_EQ(points[i][std::string(panel.level_name)], panel.levels[i]);
      const double direct = eval::evaluate(classifier, images, pool, {panel.kind, panel.levels[i]}, 1).accuracy;
      EXPECT_EQ(points[i]["accuracy"], direct);
    }
  }
}

}  // namespace
}  // namespace efla::train
