#include "efla/train/lm_trainer.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/io/json.h"
#include "efla/io/safetensors.h"
#include "efla/nn/named_tensor.h"
#include "efla/train/options.h"

namespace efla::train {
namespace {

constexpr const char* kTrainerFormat = "efla language model checkpoint 1";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kTrainerFile = "trainer.json";

// A bucket of gradients that is sent as one: 8 MiB.
constexpr std::int64_t kBucketFloats = std::int64_t{1} << 21;

using torch::autograd::Node;
using torch::autograd::Variable;

// Hands the gradients of one backward pass to a sum, each as soon as it is known.
class GradientHooks {
 public:
  GradientHooks(const NamedParameters& parameters, std::int64_t micro_batch, GradientSum& sum)
      : parameters_(parameters), micro_batch_(micro_batch), sum_(sum), seen_(parameters.size()) {
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

  // After the backward pass: parameters without a path to the loss.
  void finish() {
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      if (!seen_[i]) sum_.add(i, micro_batch_, {});
    }
  }

 private:
  void hand_over(std::size_t i) {
    torch::Tensor parameter = parameters_[i].second;
    torch::Tensor gradient = parameter.grad();
    parameter.mutable_grad().reset();
    seen_[i] = true;
    sum_.add(i, micro_batch_, std::move(gradient));
  }

  const NamedParameters& parameters_;
  std::int64_t micro_batch_;
  GradientSum& sum_;
  std::vector<bool> seen_;
  std::vector<std::shared_ptr<Node>> accumulators_;
  std::vector<std::uintptr_t> hooks_;
};

std::vector<std::int64_t> share_out(std::int64_t size, int ranks) {
  constexpr std::int64_t kAlignment = 16;  // floats of a cache line
  std::vector<std::int64_t> boundaries;
  for (int r = 0; r < ranks; ++r) boundaries.push_back(size * r / ranks / kAlignment * kAlignment);
  boundaries.push_back(size);
  return boundaries;
}

std::int64_t micro_batches_of(const LmTrainOptions& options, int ranks) {
  const std::int64_t rows = options.micro_batch * ranks;
  if (options.rows_per_step() % rows != 0) {
    throw Error(
        "train lm", "training.tokens_per_step", std::to_string(options.tokens_per_step),
        "a multiple of sequence_length x micro_batch x processes = " + std::to_string(options.sequence_length * rows));
  }
  return options.rows_per_step() / rows;
}

template <class T>
T field(const nlohmann::json& json, const char* name, const std::string& path) {
  try {
    return json.at(name).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw IoError(IoError::Kind::content, path, -1, std::string("has no ") + name + ", or one of another type");
  }
}

}  // namespace

struct LmTrainer::Sums {
  double loss = 0.0;  // over targets
  std::int64_t counted = 0, tokens = 0;
};

LmTrainer::LmTrainer(Replicas& replicas, const io::TokenFolder& corpus, const LmTrainOptions& options, Ranks& ranks)
    : replicas_(replicas),
      options_(options),
      ranks_(ranks),
      boundaries_(share_out(replicas.parameters().size(), ranks.size())),
      buckets_(gradient_buckets(boundaries_, kBucketFloats)),
      sum_(replicas.parameters(), buckets_, [this](std::size_t bucket) { send(buckets_[bucket]); }),
      adamw_(replicas.parameters(), {options.beta1, options.beta2, options.eps, options.weight_decay},
             {boundaries_[ranks.rank()], boundaries_[ranks.rank() + 1]}),
      batches_(corpus,
               {options.sequence_length, options.micro_batch * ranks.size(), options.seed, ranks.rank(), ranks.size()}),
      micro_batches_(micro_batches_of(options, ranks.size())) {}

void LmTrainer::send(const Range& bucket) {
  int owner = 0;
  while (boundaries_[owner + 1] <= bucket.begin) ++owner;
  pending_.push_back(ranks_.start_sum(sum_.gradient().narrow(0, bucket.begin, bucket.size()), owner));
}

LmTrainer::Sums LmTrainer::accumulate() {
  std::vector<data::PackedBatch> batches;
  for (std::int64_t i = 0; i < micro_batches_; ++i) batches.push_back(batches_.next());
  std::vector<Sums> sums(batches.size());
  pending_.clear();
  sum_.begin(micro_batches_);
  // Every target weighs the same, however many a micro-batch has. Their number over all ranks is known only afterwards.
  const double weight = 1.0 / static_cast<double>(options_.tokens_per_step);
  replicas_.run(micro_batches_, [&](std::int64_t i, const LmReplica& replica) {
    const LmBatch batch = make_batch(batches[i], replicas_.device());
    sums[i] = {0.0, batch.counted, batch.tokens};
    GradientHooks hooks(replica.parameters, i, sum_);
    if (batch.counted > 0) {
      const torch::Tensor loss = replicas_.loss(replica, batch);
      (loss * (weight * static_cast<double>(batch.counted))).backward();
      sums[i].loss = loss.item<double>() * static_cast<double>(batch.counted);
    }
    hooks.finish();
  });
  for (const auto& wait : pending_) wait();
  Sums all;
  for (const auto& sum : sums) {
    all.loss += sum.loss;
    all.counted += sum.counted;
    all.tokens += sum.tokens;
  }
  return all;
}

LmStepResult LmTrainer::step(const StopFunction& stop) {
  const data::PackedPosition before = batches_.position();
  const Sums sums = accumulate();
  const double squares = sum_of_squares(sum_.gradient(), adamw_.range(), replicas_.pool());
  LmStepResult result;
  double loss = 0.0, counted = 0.0, norm = 0.0;
  for (const auto& of_rank : ranks_.gather({sums.loss, static_cast<double>(sums.counted),
                                            static_cast<double>(sums.tokens), squares, stop && stop() ? 1.0 : 0.0})) {
    loss += of_rank[0];
    counted += of_rank[1];
    result.step_tokens += static_cast<std::int64_t>(of_rank[2]);
    norm += of_rank[3];
    result.stop = result.stop || of_rank[4] > 0.0;
  }
  // What the weights of accumulate leave to do; 1 where every token has a target.
  const double scale = static_cast<double>(options_.tokens_per_step) / std::max(counted, 1.0);
  result.step = step_ + 1;
  result.tokens = tokens_ + result.step_tokens;
  result.loss = loss / std::max(counted, 1.0);
  result.lr = learning_rate(options_, step_);
  result.grad_norm = std::sqrt(norm) * scale;
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    batches_.seek(before);
    return result;
  }
  const bool clips = options_.clip > 0.0 && result.grad_norm > options_.clip;
  update(clips ? scale * options_.clip / result.grad_norm : scale, result.lr);
  result.updated = true;
  ++step_;
  tokens_ = result.tokens;
  return result;
}

void LmTrainer::update(double scale, double lr) {
  adamw_.step(sum_.gradient(), scale, lr, replicas_.pool());
  std::vector<std::function<void()>> waits;
  for (int owner = 0; owner < ranks_.size(); ++owner) {
    const Range range{boundaries_[owner], boundaries_[owner + 1]};
    waits.push_back(
        ranks_.start_broadcast(replicas_.parameters().values().narrow(0, range.begin, range.size()), owner));
  }
  for (const auto& wait : waits) wait();
}

torch::Tensor LmTrainer::collect(const torch::Tensor& owned) {
  if (ranks_.size() == 1) return owned.to(torch::kCPU);
  torch::Tensor whole;
  if (ranks_.rank() == 0) whole = torch::empty({replicas_.parameters().size()}, torch::kFloat32);
  for (int owner = 0; owner < ranks_.size(); ++owner) {
    const std::int64_t size = boundaries_[owner + 1] - boundaries_[owner];
    const torch::Tensor part = owner == ranks_.rank() ? owned : torch::empty({size}, owned.options());
    if (owner != 0) ranks_.start_broadcast(part, owner)();
    if (whole.defined()) whole.narrow(0, boundaries_[owner], size).copy_(part);
  }
  return whole;
}

void LmTrainer::save(const std::filesystem::path& folder, const nlohmann::json& config) {
  const torch::Tensor exp_avg = collect(adamw_.exp_avg()), exp_avg_sq = collect(adamw_.exp_avg_sq());
  if (ranks_.rank() != 0) return;
  const FlatParameters& parameters = replicas_.parameters();
  std::vector<io::NamedTensor> entries;
  for (const auto& entry : parameters.entries()) {
    entries.push_back(nn::named_tensor("adamw.exp_avg." + entry.name, parameters.view(exp_avg, entry)));
    entries.push_back(nn::named_tensor("adamw.exp_avg_sq." + entry.name, parameters.view(exp_avg_sq, entry)));
  }
  io::write_safetensors(folder / kOptimizerFile, entries, {{"format", kTrainerFormat}});
  const nlohmann::ordered_json trainer = {
      {"format", kTrainerFormat},
      {"step", step_},
      {"tokens", tokens_},
      {"position", {{"epoch", batches_.position().epoch}, {"index", batches_.position().index}}},
      {"config", config}};
  io::write_file_atomically(folder / kTrainerFile, trainer.dump(2) + "\n");
}

void LmTrainer::restore(const std::filesystem::path& folder, const nlohmann::json& config) {
  const std::string path = (folder / kTrainerFile).string();
  const nlohmann::json trainer = io::read_json(path);
  if (!trainer.is_object() || trainer.value("format", nlohmann::json()) != kTrainerFormat) {
    throw IoError(IoError::Kind::content, path, -1, std::string("its format is not \"") + kTrainerFormat + "\"");
  }
  require_same(config, field<nlohmann::json>(trainer, "config", path), "resume", path);
  const io::SafetensorsFile file(folder / kOptimizerFile);
  const FlatParameters& parameters = replicas_.parameters();
  for (const auto& [prefix, owned] :
       {std::pair("adamw.exp_avg.", adamw_.exp_avg()), std::pair("adamw.exp_avg_sq.", adamw_.exp_avg_sq())}) {
    const torch::Tensor whole = torch::empty({parameters.size()}, torch::kFloat32);
    for (const auto& entry : parameters.entries()) {
      nn::read_tensor(file, prefix + entry.name, parameters.view(whole, entry));
    }
    owned.copy_(whole.narrow(0, adamw_.range().begin, adamw_.range().size()));
  }
  const auto position = field<nlohmann::json>(trainer, "position", path);
  batches_.seek({field<std::int64_t>(position, "epoch", path), field<std::int64_t>(position, "index", path)});
  step_ = field<std::int64_t>(trainer, "step", path);
  tokens_ = field<std::int64_t>(trainer, "tokens", path);
  if (step_ < 0 || tokens_ < 0) throw IoError(IoError::Kind::content, path, -1, "its step or its tokens are below 0");
  adamw_.set_steps(step_);
}

}  // namespace efla::train
