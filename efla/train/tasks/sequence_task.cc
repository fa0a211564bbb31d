#include "efla/train/tasks/sequence_task.h"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/torch/graph_replay.h"
#include "efla/torch/one_thread.h"
#include "efla/train/data_order.h"

namespace efla::train {
namespace {

using data::synthetic::Example;
using SyntheticTask = data::synthetic::Task;

constexpr std::int64_t kNoAnswer = -1;

// Tokens that are computed at a time: by a thread of the CPU, or by a GPU. Sums over a batch add the sums of groups of
// this size, so another size gives other bits.
std::int64_t part_tokens(const torch::Device& device) { return device.is_cpu() ? 2048 : 65536; }

// Draws examples into the memory of earlier ones, because runs side by side would wait for one another to allocate.
void draw_examples(const SyntheticTask& task, std::uint64_t seed, data::Split split,
                   const std::vector<std::int64_t>& indices, std::vector<Example>& examples) {
  examples.resize(indices.size());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    data::synthetic::draw_example(task, seed, split, indices[i], examples[i]);
  }
}

// Neighbouring examples of a batch, with the places at which something is asked. On a GPU copies of the last sequence
// and of the last place follow, so that batches have few shapes.
struct Questions {
  torch::Tensor ids;                   // [B, T] int64, on the model's device
  torch::Tensor places;                // [M] int64, on the model's device
  std::vector<std::int64_t> targets;   // of the first places
  std::vector<std::int64_t> sequence;  // of the first places: index of the sequence in the part
};

// Returns count, or on a GPU the next multiple of a unit, so that few numbers are possible. The unit is an eighth of
// the largest power of two that is not above count, and at least `least`.
std::int64_t padded(std::int64_t count, std::int64_t least, const torch::Device& device) {
  if (device.is_cpu() || count == 0) return count;
  const auto unit = std::max<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(count)) / 8, least);
  return (count + unit - 1) / unit * unit;
}

Questions make_questions(std::span<const Example> examples, const torch::Device& device) {
  const auto given = static_cast<std::int64_t>(examples.size()), batch = padded(given, 8, device);
  const auto tokens = static_cast<std::int64_t>(examples.front().inputs.size());
  Questions part{torch::empty({batch, tokens}, torch::kLong), {}, {}, {}};
  std::vector<std::int64_t> places;
  auto* ids = part.ids.data_ptr<std::int64_t>();
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto& inputs = examples[std::min(b, given - 1)].inputs;
    std::copy(inputs.begin(), inputs.end(), ids + b * tokens);
  }
  for (std::int64_t b = 0; b < given; ++b) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (examples[b].targets[t] == kIgnoreIndex) continue;
      places.push_back(b * tokens + t);
      part.targets.push_back(examples[b].targets[t]);
      part.sequence.push_back(b);
    }
  }
  places.resize(padded(std::ssize(places), 64, device), places.empty() ? 0 : places.back());
  part.ids = part.ids.to(device, /*non_blocking=*/true);
  part.places = torch::tensor(places, torch::kLong).to(device, /*non_blocking=*/true);
  return part;
}

// Divides examples into parts that are computed at a time: of one length, and at most `part_tokens` tokens unless a
// part is one example.
std::vector<std::span<const Example>> parts_of(const std::vector<Example>& examples, std::int64_t part_tokens) {
  std::vector<std::span<const Example>> parts;
  std::size_t first = 0;
  while (first < examples.size()) {
    const std::size_t tokens = examples[first].inputs.size(), most = std::max<std::size_t>(part_tokens / tokens, 1);
    std::size_t count = 1;
    while (count < most && first + count < examples.size() && examples[first + count].inputs.size() == tokens) ++count;
    parts.push_back(std::span(examples).subspan(first, count));
    first += count;
  }
  return parts;
}

struct Count {
  std::int64_t right = 0, asked = 0;
};

using Counts = std::vector<Count>;  // by group: class or sequence

// Returns the number of groups of which something is asked, and the sum of their shares of right answers.
std::pair<double, double> sum_shares(const Counts& groups) {
  double asked = 0.0, sum = 0.0;
  for (const Count& count : groups) {
    if (count.asked == 0) continue;
    asked += 1.0;
    sum += static_cast<double>(count.right) / static_cast<double>(count.asked);
  }
  return {asked, sum};
}

// Adds the right answers of one part to `groups`, by class or by sequence from `first` on. Returns false where a logit
// is not finite.
bool count_right(const SequenceClassifier& model, const SyntheticTask& task, std::span<const Example> examples,
                 std::int64_t first, libtorch::GraphReplay& replay, Counts& groups) {
  const Questions part = make_questions(examples, nn::device_of(model.parameters));
  if (part.targets.empty()) return true;
  const auto answer = [&](const std::vector<torch::Tensor>& inputs) {
    const torch::Tensor logits = model.logits(inputs[0], inputs[1]);
    return std::vector<torch::Tensor>{torch::where(logits.isfinite().all(), logits.argmax(1), kNoAnswer)};
  };
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, parameter] : model.parameters) parameters.push_back(parameter);
  const torch::Tensor answers = replay.call(answer, {part.ids, part.places}, parameters).front().to(torch::kCPU);
  const auto* given = answers.data_ptr<std::int64_t>();
  if (given[0] == kNoAnswer) return false;
  for (std::size_t i = 0; i < part.targets.size(); ++i) {
    const bool by_class = task.accuracy == data::synthetic::Accuracy::classes;
    Count& count = groups[by_class ? part.targets[i] : first + part.sequence[i]];
    ++count.asked;
    count.right += given[i] == part.targets[i];
  }
  return true;
}

}  // namespace

std::int64_t SyntheticTraining::steps_per_epoch() const { return (examples + batch_size - 1) / batch_size; }

void validate(const SyntheticTraining& t) {
  const Require require("train");
  require(t.steps >= 1 && t.steps <= 1'000'000'000, "steps", t.steps, "1 to 10^9");
  require(t.batch_size >= 1 && t.batch_size <= 65536, "batch_size", t.batch_size, "1 to 65536");
  require(t.examples >= 0 && t.examples <= (1 << 30), "examples", t.examples, "0 (new ones each step) to 2^30");
  require(t.lr > 0.0 && t.lr <= 1.0, "lr", t.lr, "a number above 0 and at most 1");
  require(t.lr_floor >= 0.0 && t.lr_floor <= t.lr, "lr_floor", t.lr_floor, "0 to the learning rate");
  require(t.weight_decay >= 0.0 && t.weight_decay <= 100.0, "weight_decay", t.weight_decay, "0 to 100");
  require(t.warmup >= 0.0 && t.warmup < 1.0, "warmup", t.warmup, "a part of all steps, at least 0 and below 1");
  require(t.clip >= 0.0 && std::isfinite(t.clip), "clip", t.clip, "a finite norm, or 0 for none");
}

nlohmann::json to_json(const SyntheticTraining& t) {
  return {{"steps", t.steps},
          {"batch_size", t.batch_size},
          {"examples", t.examples},
          {"lr", t.lr},
          {"lr_floor", t.lr_floor},
          {"weight_decay", t.weight_decay},
          {"schedule", schedule_name(t.schedule)},
          {"warmup", t.warmup},
          {"clip", t.clip},
          {"seed", t.seed}};
}

SequenceTask::SequenceTask(MakeModel make, const SyntheticTask& task, const SyntheticTraining& training,
                           const SyntheticTest& test)
    : make_(std::move(make)), task_(task), training_((validate(training), training)), test_(test) {}

nn::NamedParameters SequenceTask::add_copy() {
  copies_.push_back(make_());
  return copies_.back().parameters;
}

LearningRate SequenceTask::learning_rate() const {
  const std::int64_t unit = std::max<std::int64_t>(training_.steps_per_epoch(), 1);
  const std::int64_t units = (training_.steps + unit - 1) / unit;
  return {training_.schedule, training_.lr, training_.lr_floor, steps_of(training_.warmup, units), units};
}

std::int64_t SequenceTask::schedule_step(std::int64_t step) const {
  return step / std::max<std::int64_t>(training_.steps_per_epoch(), 1);
}

std::vector<std::int64_t> SequenceTask::batch_indices(std::int64_t step) {
  const std::int64_t size = training_.batch_size;
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  if (training_.examples == 0) {
    std::iota(indices.begin(), indices.end(), step * size);
    return indices;
  }
  const std::int64_t epoch = step / training_.steps_per_epoch(), first = step % training_.steps_per_epoch() * size;
  if (order_epoch_ != epoch) {
    order_ = epoch_order(training_.seed, epoch, static_cast<std::uint32_t>(training_.examples));
    order_epoch_ = epoch;
  }
  indices.resize(static_cast<std::size_t>(std::min(size, training_.examples - first)));
  std::copy_n(order_.begin() + first, indices.size(), indices.begin());
  return indices;
}

std::int64_t SequenceTask::draw(std::int64_t step) {
  draw_examples(task_, training_.seed, data::Split::train, batch_indices(step), batch_);
  std::stable_sort(batch_.begin(), batch_.end(),
                   [](const auto& a, const auto& b) { return a.inputs.size() < b.inputs.size(); });
  std::int64_t targets = 0;
  for (const auto& example : batch_) {
    targets += std::count_if(example.targets.begin(), example.targets.end(), [](auto t) { return t != kIgnoreIndex; });
  }
  targets_ = static_cast<double>(targets);
  parts_ = parts_of(batch_, part_tokens(nn::device_of(copies_.front().parameters)));
  return std::ssize(parts_);
}

Part SequenceTask::part(std::int64_t i) {
  const auto& examples = parts_[static_cast<std::size_t>(i)];
  const torch::Device device = nn::device_of(copies_.front().parameters);
  const Questions asked = make_questions(examples, device);
  std::vector<std::int64_t> padded_targets = asked.targets;
  padded_targets.resize(static_cast<std::size_t>(asked.places.size(0)), kIgnoreIndex);
  const torch::Tensor targets = torch::tensor(padded_targets, torch::kLong).to(device, /*non_blocking=*/true);
  const torch::Tensor divisor = torch::full({}, normaliser(), torch::kFloat).to(device, /*non_blocking=*/true);
  return {{asked.ids, asked.places, targets, divisor}, std::ssize(asked.targets), std::ssize(examples), normaliser()};
}

PartLoss SequenceTask::loss(const std::vector<torch::Tensor>& inputs, int copy) {
  namespace functional = torch::nn::functional;
  const auto sum = functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(kIgnoreIndex);
  const torch::Tensor logits = copies_[static_cast<std::size_t>(copy)].logits(inputs[0], inputs[1]);
  const torch::Tensor objective = functional::cross_entropy(logits, inputs[2], sum) / inputs[3];
  return {objective, objective.detach(), {}};
}

nlohmann::ordered_json SequenceTask::evaluate(const DataParallel& model, ProcessGroup& /*group*/,
                                              const StopFunction& stop) {
  const double accuracy = train::evaluate(copies_.front(), *test_.task, training_.seed, test_.examples,
                                          training_.batch_size, model.pool(), replay_, stop);
  if (std::isnan(accuracy))
    throw NonFinite("a test of the task " + test_.task->name + " has a logit that is not finite");
  return {{"accuracy", accuracy}};
}

bool SequenceTask::enough(const nlohmann::ordered_json& evaluation) const {
  return test_.enough && evaluation.at("accuracy").get<double>() >= *test_.enough;
}

UpdateOptions update_options(const SyntheticTraining& training) {
  return {{.beta2 = 0.999, .weight_decay = training.weight_decay}, training.clip};
}

double evaluate(const SequenceClassifier& model, const SyntheticTask& task, std::uint64_t seed, std::int64_t examples,
                std::int64_t batch_size, ThreadPool& pool, libtorch::GraphReplay& replay, const StopFunction& stop) {
  const bool by_class = task.accuracy == data::synthetic::Accuracy::classes;
  const torch::Device device = nn::device_of(model.parameters);
  double sum = 0.0, weights = 0.0;
  std::vector<Example> batch;
  for (std::int64_t first = 0; first < examples; first += batch_size) {
    std::vector<std::int64_t> indices(static_cast<std::size_t>(std::min(batch_size, examples - first)));
    std::iota(indices.begin(), indices.end(), first);
    draw_examples(task, seed, data::Split::test, indices, batch);
    const auto parts = parts_of(batch, part_tokens(device));
    const Counts none(by_class ? static_cast<std::size_t>(task.vocab) : batch.size());
    std::vector<Counts> counts(parts.size(), none);
    std::atomic<bool> stopped = false, finite = true;
    libtorch::run_tasks(pool, device, std::ssize(parts), [&](std::int64_t i) {
      if (stopped || (stop && stop())) {
        stopped = true;
        return;
      }
      const torch::NoGradGuard no_grad;
      if (!count_right(model, task, parts[i], parts[i].data() - batch.data(), replay, counts[i])) finite = false;
    });
    if (stopped) throw Stopped();
    if (!finite) return std::numeric_limits<double>::quiet_NaN();
    Counts groups = none;
    for (const auto& part : counts) {
      for (std::size_t group = 0; group < groups.size(); ++group) {
        groups[group].right += part[group].right;
        groups[group].asked += part[group].asked;
      }
    }
    const auto [asked, shares] = sum_shares(groups);
    if (asked == 0.0) continue;
    // Accuracy by class weighs batches equally; accuracy by example weighs examples equally.
    sum += by_class ? shares / asked : shares;
    weights += by_class ? 1.0 : asked;
  }
  if (weights == 0.0) throw Error("evaluate", "task", task.name, "one that asks for something in its test examples");
  return sum / weights;
}

}  // namespace efla::train
