#include "efla/train/trainer.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/torch/context.h"
#include "efla/train/checkpoint.h"

namespace efla::train {
namespace {

// Floats of a bucket, which the ranks sum in one operation: 8 MiB.
constexpr std::int64_t kBucketFloats = std::int64_t{1} << 21;

using torch::autograd::Node;
using torch::autograd::Variable;

// Hands over the gradients of one backward pass, each as soon as it is known.
class GradientHooks {
 public:
  using Receive = std::function<void(std::size_t parameter, torch::Tensor gradient)>;

  GradientHooks(const nn::NamedParameters& parameters, Receive receive)
      : parameters_(parameters), receive_(std::move(receive)), seen_(parameters.size()) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      // The parameter itself does not keep its accumulator alive.
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameters_[i].second));
      hooks_.push_back(accumulators_.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, i](const std::vector<Variable>& outputs, const std::vector<Variable>&) {
            hand_over(i);
            return outputs;
          })));
    }
  }
  ~GradientHooks() {
    for (std::size_t i = 0; i < hooks_.size(); ++i) accumulators_[i]->del_post_hook(hooks_[i]);
  }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Called after the backward pass: parameters without a path to the loss have an undefined gradient.
  void finish() {
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      if (!seen_[i]) receive_(i, {});
    }
  }

 private:
  void hand_over(std::size_t i) {
    torch::Tensor parameter = parameters_[i].second;
    torch::Tensor gradient = parameter.grad();
    parameter.mutable_grad().reset();
    seen_[i] = true;
    receive_(i, std::move(gradient));
  }

  const nn::NamedParameters& parameters_;
  Receive receive_;
  std::vector<bool> seen_;
  std::vector<std::shared_ptr<Node>> accumulators_;
  std::vector<std::uintptr_t> hooks_;
};

std::vector<std::int64_t> partition(std::int64_t size, int ranks) {
  constexpr std::int64_t kAlignment = 16;  // floats of a cache line
  std::vector<std::int64_t> boundaries;
  for (int r = 0; r < ranks; ++r) boundaries.push_back(size * r / ranks / kAlignment * kAlignment);
  boundaries.push_back(size);
  return boundaries;
}

}  // namespace

struct Trainer::Sums {
  double loss = 0.0;  // over targets
  std::int64_t targets = 0, examples = 0;
  double correct = 0.0;
  double squares = 0.0;  // of the gradient elements that this rank owns; not a sum over parts

  void add(const Sums& part) {
    loss += part.loss;
    targets += part.targets;
    examples += part.examples;
    correct += part.correct;
  }
};

Trainer::Trainer(Task& task, DataParallel& model, const UpdateOptions& options, ProcessGroup& group)
    : task_(task),
      model_(model),
      options_(options),
      group_(group),
      rate_(task.learning_rate()),
      boundaries_(partition(model.parameters().size(), group.size())),
      buckets_(gradient_buckets(boundaries_, kBucketFloats)),
      sum_(model.parameters(), buckets_, [this](std::size_t bucket) { send(buckets_[bucket]); }),
      adamw_(model.parameters(), options.adamw, {boundaries_[group.rank()], boundaries_[group.rank() + 1]}) {}

void Trainer::send(const Range& bucket) {
  int owner = 0;
  while (boundaries_[owner + 1] <= bucket.begin) ++owner;
  pending_.push_back(group_.start_sum(sum_.gradient().narrow(0, bucket.begin, bucket.size()), owner));
}

Trainer::Sums Trainer::accumulate() {
  const libtorch::ReproducibleOnly reproducible(model_.device());
  const std::int64_t parts = task_.draw(step_);
  if (model_.device().is_cuda() && group_.size() == 1 && task_.repeats()) return accumulate_by_replay(parts);
  std::vector<Sums> sums(static_cast<std::size_t>(parts));
  pending_.clear();
  sum_.begin(parts);
  model_.run(parts, [&](std::int64_t i, int copy) {
    GradientHooks hooks(model_.copy(copy), [&](std::size_t parameter, torch::Tensor gradient) {
      sum_.add(parameter, i, std::move(gradient));
    });
    const Part part = task_.part(i);
    PartLoss loss;
    if (part.targets > 0) {
      {
        const auto precision = model_.use_precision();
        loss = task_.loss(part.inputs, copy);
      }
      loss.objective.backward();
    }
    sums[i] = {loss.loss.defined() ? loss.loss.item<double>() * part.weight : 0.0, part.targets, part.examples,
               loss.correct.defined() ? loss.correct.item<double>() : 0.0};
    hooks.finish();
  });
  for (const auto& wait : pending_) wait();
  Sums all;
  for (const auto& sum : sums) all.add(sum);
  all.squares = sum_of_squares(sum_.gradient(), adamw_.range(), model_.pool()).item<double>();
  return all;
}

Trainer::Sums Trainer::accumulate_by_replay(std::int64_t parts) {
  const auto run = [&](const std::vector<torch::Tensor>& inputs) {
    // Gradients wait until they are as large as a bucket, so that small ones are added together and large ones do not
    // all wait.
    std::vector<torch::Tensor> gradients(model_.copy(0).size());
    std::int64_t waiting = 0;  // floats
    GradientHooks hooks(model_.copy(0), [&](std::size_t parameter, torch::Tensor gradient) {
      waiting += gradient.defined() ? gradient.numel() : 0;
      gradients[parameter] = std::move(gradient);
      if (waiting < kBucketFloats) return;
      sum_.add_at_once(std::exchange(gradients, std::vector<torch::Tensor>(gradients.size())));
      waiting = 0;
    });
    PartLoss loss;
    {
      const auto precision = model_.use_precision();
      loss = task_.loss(inputs, 0);
    }
    loss.objective.backward();
    sum_.add_at_once(gradients);
    const torch::Tensor of_part = loss.loss.to(torch::kDouble);
    const torch::Tensor correct = loss.correct.defined() ? loss.correct.to(torch::kDouble) : torch::zeros_like(of_part);
    return std::vector<torch::Tensor>{torch::stack({of_part, correct})};
  };
  Sums all;
  std::vector<double> weights(static_cast<std::size_t>(parts));
  // Loss and correct targets of each part, then the gradient's sum of squares: read at once, so that the step waits for
  // the GPU once.
  torch::Tensor results = torch::zeros({parts + 1, 2}, sum_.gradient().options().dtype(torch::kDouble));
  sum_.gradient().zero_();
  for (std::int64_t i = 0; i < parts; ++i) {
    const Part part = task_.part(i);
    all.targets += part.targets;
    all.examples += part.examples;
    weights[i] = part.weight;
    if (part.targets > 0) results[i].copy_(replay_.call(run, part.inputs, {sum_.gradient()}).front());
  }
  results[parts][0].copy_(sum_of_squares(sum_.gradient(), adamw_.range(), model_.pool()));
  results = results.to(torch::kCPU);
  const auto rows = results.accessor<double, 2>();
  for (std::int64_t i = 0; i < parts; ++i) {
    all.loss += rows[i][0] * weights[i];
    all.correct += rows[i][1];
  }
  all.squares = rows[parts][0];
  return all;
}

StepResult Trainer::step(const StopFunction& stop) {
  const nlohmann::json before = task_.position();
  const Sums sums = accumulate();
  StepResult result;
  double loss = 0.0, targets = 0.0, correct = 0.0, norm = 0.0;
  for (const auto& of_rank :
       group_.gather({sums.loss, static_cast<double>(sums.targets), static_cast<double>(sums.examples), sums.correct,
                      sums.squares, stop && stop() ? 1.0 : 0.0})) {
    loss += of_rank[0];
    targets += of_rank[1];
    result.step_examples += static_cast<std::int64_t>(of_rank[2]);
    correct += of_rank[3];
    norm += of_rank[4];
    result.stop = result.stop || of_rank[5] > 0.0;
  }
  // Corrects an estimated normaliser; 1 where the number of targets was known.
  const double scale = task_.normaliser() / std::max(targets, 1.0);
  result.step = step_ + 1;
  result.examples = examples_ + result.step_examples;
  result.loss = loss / std::max(targets, 1.0);
  result.accuracy = correct / std::max(targets, 1.0);
  result.lr = rate_.at(task_.schedule_step(step_));
  result.grad_norm = std::sqrt(norm) * scale;
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    task_.seek({before, io::refuse_argument("train"), "position"});
    return result;
  }
  const bool clips = options_.clip > 0.0 && result.grad_norm > options_.clip;
  update(clips ? scale * options_.clip / result.grad_norm : scale, result.lr);
  result.updated = true;
  ++step_;
  examples_ = result.examples;
  return result;
}

void Trainer::update(double scale, double lr) {
  adamw_.step(sum_.gradient(), scale, lr, model_.pool());
  std::vector<std::function<void()>> waits;
  for (int owner = 0; owner < group_.size(); ++owner) {
    const Range range{boundaries_[owner], boundaries_[owner + 1]};
    waits.push_back(group_.start_broadcast(model_.parameters().values().narrow(0, range.begin, range.size()), owner));
  }
  for (const auto& wait : waits) wait();
}

torch::Tensor Trainer::collect(const torch::Tensor& owned) {
  if (group_.size() == 1) return owned.to(torch::kCPU);
  torch::Tensor whole;
  if (group_.rank() == 0) whole = torch::empty({model_.parameters().size()}, torch::kFloat32);
  for (int owner = 0; owner < group_.size(); ++owner) {
    const std::int64_t size = boundaries_[owner + 1] - boundaries_[owner];
    const torch::Tensor part = owner == group_.rank() ? owned : torch::empty({size}, owned.options());
    if (owner != 0) group_.start_broadcast(part, owner)();
    if (whole.defined()) whole.narrow(0, boundaries_[owner], size).copy_(part);
  }
  return whole;
}

void Trainer::save(const std::filesystem::path& folder, const nlohmann::json& config) {
  const torch::Tensor exp_avg = collect(adamw_.exp_avg()), exp_avg_sq = collect(adamw_.exp_avg_sq());
  if (group_.rank() != 0) return;
  task_.write_model(folder, model_.parameters());
  write_checkpoint(folder, {step_, examples_, task_.position(), config}, model_.parameters(), exp_avg, exp_avg_sq);
}

void Trainer::restore(const std::filesystem::path& folder, const nlohmann::json& config) {
  const TrainerState state = read_trainer_state(folder);
  const std::string file = trainer_file(folder);
  const auto refuse = io::refuse_in_file(file);
  io::require_same(without_places(config), without_places(state.config), "resume", file);
  if (state.step > task_.steps()) {
    refuse("step", std::to_string(state.step), "at most " + std::to_string(task_.steps()) + ", the steps of the run");
  }
  task_.read_model(folder, model_.parameters());
  const torch::Tensor exp_avg = torch::empty({model_.parameters().size()}, torch::kFloat32);
  const torch::Tensor exp_avg_sq = torch::empty_like(exp_avg);
  read_moments(folder, model_.parameters(), exp_avg, exp_avg_sq);
  const Range& owned = adamw_.range();
  adamw_.exp_avg().copy_(exp_avg.narrow(0, owned.begin, owned.size()));
  adamw_.exp_avg_sq().copy_(exp_avg_sq.narrow(0, owned.begin, owned.size()));
  adamw_.set_steps(state.step);
  task_.seek({state.position, refuse, "position"});
  step_ = state.step;
  examples_ = state.examples;
}

}  // namespace efla::train
