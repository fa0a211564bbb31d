// Training on synthetic tasks: the model, and the measures of accuracy.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "efla/nn/models/sequence_model.h"
#include "efla/train/tasks/sequence_task.h"
#include "tests/support/expect_error.h"

namespace efla::train {
namespace {

using data::synthetic::Accuracy;
using data::synthetic::Example;
using data::synthetic::make_task;
using SyntheticTask = data::synthetic::Task;
using test::expect_error;
using torch::Tensor;

nn::SequenceModelConfig small_model(const SyntheticTask& task, const std::string& mixer = "efla") {
  return {.mixer = mixer,
          .vocab = task.vocab,
          .hidden = 16,
          .layers = 1,
          .heads = 2,
          .head_dim = 0,
          .reconstructs = task.reconstructs};
}

Tensor random_ids(const SyntheticTask& task, std::int64_t batch) {
  torch::manual_seed(1);
  return torch::randint(task.vocab, {batch, task.length}, torch::kLong);
}

TEST(SequenceModel, TellsATokenFromThoseUpToIt) {
  const auto task = make_task("in-context-recall", {{"length", 20}});
  for (const char* mixer : {"efla", "kda", "softmax"}) {
    const nn::SequenceModel model(small_model(task, mixer), nn::Initialiser(1));
    const auto ids = random_ids(task, 2);
    auto later = ids.clone();
    later[1][10] = (later[1][10] + 1) % task.vocab;
    const auto places = torch::arange(2 * task.length);
    const auto logits = model.logits(ids, places), changed = model.logits(later, places);
    ASSERT_EQ(logits.sizes(), at::IntArrayRef({2 * task.length, task.vocab}));
    const std::int64_t change = task.length + 10;
    EXPECT_TRUE(torch::equal(logits.slice(0, 0, change), changed.slice(0, 0, change))) << mixer;
    EXPECT_FALSE(torch::equal(logits[change], changed[change])) << mixer;
    const auto some = torch::tensor({5, 30, 7}, torch::kLong);
    EXPECT_TRUE(torch::allclose(model.logits(ids, some), logits.index_select(0, some), 1e-5, 1e-6)) << mixer;
  }
}

TEST(SequenceModel, ReconstructsFromTheLastTokenAndThePosition) {
  const auto task = make_task("compression", {{"length", 12}});
  const nn::SequenceModel model(small_model(task), nn::Initialiser(1));
  const auto ids = random_ids(task, 2);
  const auto places = torch::arange(2 * task.length);
  const auto logits = model.logits(ids, places);
  // Whatever position is asked for, the first token matters to it; another sequence's does not.
  auto other = ids.clone();
  other[1][0] = (other[1][0] + 1) % task.vocab;
  const auto changed = model.logits(other, places);
  for (std::int64_t t = 0; t < task.length; ++t) {
    EXPECT_TRUE(torch::equal(changed[t], logits[t])) << t;
    EXPECT_FALSE(torch::equal(changed[task.length + t], logits[task.length + t])) << t;
    if (t > 0) {
      EXPECT_FALSE(torch::equal(logits[t], logits[t - 1])) << t;
    }
  }
}

TEST(SequenceModel, RefusesWhatItCannotBe) {
  const auto task = make_task("parity");
  const auto refused = [&](auto change, const char* field) {
    auto config = small_model(task);
    change(config);
    expect_error([&] { nn::SequenceModel(config, nn::Initialiser(1)); }, field, "");
  };
  refused([](auto& c) { c.mixer = "elfa"; }, "mixer");
  refused([](auto& c) { c.layers = 0; }, "layers");
  refused([](auto& c) { c.vocab = 0; }, "vocab");
  refused(
      [](auto& c) {
        c.vocab = 1 << 24;
        c.hidden = 1 << 14;
      },
      "sizes vocab, hidden, layers");
}

// A task of four tokens a sequence that asks for what `targets` says, and a model that always answers 0.
SyntheticTask given_targets(std::vector<std::vector<std::int32_t>> targets, Accuracy accuracy) {
  SyntheticTask task;
  task.name = "given";
  task.vocab = 4;
  task.length = 4;
  task.accuracy = accuracy;
  const auto next = std::make_shared<std::size_t>(0);
  task.draw = [targets, next](Random&, data::Split, Example& example) {
    example.inputs.assign(4, 0);
    example.targets = targets[(*next)++];
  };
  return task;
}

SequenceClassifier constant_model() {
  SequenceClassifier model;
  model.logits = [](const Tensor&, const Tensor& places) {
    auto logits = torch::zeros({places.size(0), 4});
    logits.select(1, 0).fill_(1.0);
    return logits;
  };
  return model;
}

TEST(SyntheticAccuracy, IsNotANumberWhereALogitIsNotFinite) {
  ThreadPool pool(2);
  libtorch::GraphReplay replay;
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const auto task = given_targets({{0, 0, 0, 1}, {0, 1, 1, 1}}, Accuracy::examples);
    auto model = constant_model();
    model.logits = [logits = model.logits, bad](const torch::Tensor& ids, const torch::Tensor& places) {
      auto result = logits(ids, places);
      result[1][3] = bad;  // not the class that is answered
      return result;
    };
    EXPECT_TRUE(std::isnan(evaluate(model, task, 1, 2, 2, pool, replay)));
  }
}

TEST(SyntheticAccuracy, CountsByClassOrByExample) {
  constexpr auto kNo = kIgnoreIndex;
  const std::vector<std::vector<std::int32_t>> targets{{0, 0, 0, 1}, {0, kNo, kNo, kNo}, {2, 2, kNo, 0}};
  ThreadPool pool(2);
  libtorch::GraphReplay replay;
  // In one batch: class 0 is right 5 of 5 times, classes 1 and 2 never are.
  EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::classes), 1, 3, 3, pool, replay),
                   1.0 / 3.0);
  // In batches of two: the mean of (1 + 0) / 2 and (1 + 0) / 2.
  EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::classes), 1, 3, 2, pool, replay), 0.5);
  // By example: 3/4, 1 and 1/3, whatever the batches.
  const double mean = (0.75 + 1.0 + 1.0 / 3.0) / 3.0;
  for (const std::int64_t batch : {1, 2, 3}) {
    EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::examples), 1, 3, batch, pool, replay),
                     mean);
  }
}

TEST(SequenceTask, StopsAtALossThatIsNotFinite) {
  const auto synthetic = make_task("parity", {{"length", 8}});
  const auto weight = torch::zeros({2}, torch::requires_grad());
  const auto make = [&] {
    SequenceClassifier model;
    model.parameters = {{"weight", weight}};
    model.logits = [&](const Tensor&, const Tensor& places) {
      return weight.unsqueeze(0).expand({places.size(0), 2}) / 0.0;
    };
    return model;
  };
  const SyntheticTraining training{.steps = 2, .batch_size = 2};
  ThreadPool pool(1);
  SequenceTask task(make, synthetic, training);
  DataParallel model(
      1, [&] { return task.add_copy(); }, pool);
  const auto alone = ProcessGroup::join({}, torch::kCPU);
  Trainer trainer(task, model, update_options(training), *alone);
  EXPECT_FALSE(trainer.step().updated);
  EXPECT_EQ(trainer.steps_done(), 0);
  EXPECT_TRUE(torch::equal(weight, torch::zeros({2})));
}

}  // namespace
}  // namespace efla::train
