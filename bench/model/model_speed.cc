#include "bench/model/model_speed.h"

#include <fmt/format.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bench/model/random_tokens.h"
#include "bench/op/eager_delta.h"
#include "bench/op_times.h"
#include "bench/timing.h"
#include "efla/base/check.h"
#include "efla/data/digits.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/nn/layers/block.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/ops/delta.h"
#include "efla/torch/one_thread.h"
#include "efla/train/tasks/image_task.h"
#include "efla/train/tasks/lm_task.h"
#include "efla/train/trainer.h"

namespace efla::bench {
namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBatchesAThread = 2;  // micro-batches per thread in a step of training
constexpr std::int64_t kImages = 128;
constexpr std::int64_t kPrompt = 256, kDraws = 32;  // tokens

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A mixer without decay that computes its recurrence in eager LibTorch. Shares the parameters of another mixer.
class EagerMixer : public nn::Mixer {
 public:
  EagerMixer(const nn::Mixer& mixer, const EagerForm& form) : nn::Mixer(mixer), form_(form) {}

 protected:
  Tensor recur(const Inputs& inputs, const Tensor& cu_seqlens) const override {
    Require("bench model")(!cu_seqlens.defined() || cu_seqlens.size(0) == 2, "cu_seqlens", "packed sequences",
                           "one sequence");
    const auto [q, k, v] = heads_of(inputs.qkv);
    return std::get<0>(eager_chunk(q, k, v, inputs.beta, form_));
  }
  Tensor recur_step(const Inputs& inputs, Tensor& memory) const override {
    const auto [q, k, v] = heads_of(inputs.qkv);
    Tensor o;
    std::tie(o, memory) = eager_step(q.select(1, 0), k.select(1, 0), v.select(1, 0), inputs.beta.select(1, 0), memory);
    return o;
  }

 private:
  EagerForm form_;
};

// Switches the layers of models between their mixers, which use the kernels, and EagerMixers.
class Recurrences {
 public:
  explicit Recurrences(const EagerForm& form) : form_(form) {}

  // Adds the layers of a model without decay.
  void add(const torch::nn::Module& model) {
    for (const auto& module : model.modules(/*include_self=*/false)) {
      auto block = std::dynamic_pointer_cast<nn::Block>(module);
      if (!block) continue;
      const auto kernels = std::get<std::shared_ptr<nn::Mixer>>(block->mixer);
      layers_.push_back({block, kernels, std::make_shared<EagerMixer>(*kernels, form_)});
    }
  }

  const EagerForm& form() const { return form_; }
  void use_kernels() const {
    for (const auto& layer : layers_) layer.block->mixer = layer.kernels;
  }
  void use_eager() const {
    for (const auto& layer : layers_) layer.block->mixer = layer.eager;
  }

 private:
  struct Layer {
    std::shared_ptr<nn::Block> block;
    std::shared_ptr<nn::Mixer> kernels, eager;
  };

  EagerForm form_;
  std::vector<Layer> layers_;
};

// Returns the fastest variant of the eager operator, forward and backward, on one thread, at the model's shape.
EagerForm fastest_form(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  EagerForm fastest;
  double least = 0.0;
  for (const auto transform : {UtTransform::triangular_solve, UtTransform::row_loop}) {
    for (const std::int64_t chunk : {16, 32, 64}) {
      const EagerForm form{chunk, transform};
      const auto x = [&] { return torch::randn({batch, tokens, heads, dim}).requires_grad_(); };
      const auto run = [&] {
        std::get<0>(eager_chunk(x(), x() * 0.1, x(), torch::rand({batch, tokens, heads}), form)).sum().backward();
      };
      run();
      const auto start = Clock::now();
      run();
      const double seconds = seconds_since(start);
      if (least == 0.0 || seconds < least) {
        least = seconds;
        fastest = form;
      }
    }
  }
  return fastest;
}

struct ModelResult {
  std::string operation, unit, eager_form;
  double amount = 0;  // tokens or images per call
  Timing kernels, eager;
  std::vector<std::pair<std::string, double>> shares;  // of the calling threads' time by part, the largest first
};

// Returns the share of the calling threads' time in each part of a step, and outside of all operators.
std::vector<std::pair<std::string, double>> shares_of(const std::function<void()>& step, int threads) {
  const auto start = Clock::now();
  const auto ops = op_times(step);
  const double all = seconds_since(start) * threads;
  std::map<std::string, double> parts;
  double inside = 0.0;
  for (const auto& [op, seconds] : ops) {
    parts[part_of(op)] += seconds / all;
    inside += seconds / all;
  }
  parts["outside of operators (optimiser, waiting, the rest)"] = 1.0 - inside;
  std::vector<std::pair<std::string, double>> sorted(parts.begin(), parts.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return sorted;
}

void report_model(const ModelSpeedOptions& options, std::int64_t parameters, const ModelResult& r,
                  const std::function<void(const nlohmann::ordered_json&)>& write) {
  const double kernels = r.amount / r.kernels.median, eager_rate = r.amount / r.eager.median;
  fmt::print("{}: {:.0f} {}/s; with the operator in eager LibTorch ({}) {:.0f}: {:.2f} x\n", r.operation, kernels,
             r.unit, r.eager_form, eager_rate, kernels / eager_rate);
  nlohmann::ordered_json shares;
  for (const auto& [part, share] : r.shares) {
    fmt::print("  {:5.1f} %  {}\n", 1e2 * share, part);
    shares[part] = share;
  }
  std::fflush(stdout);
  write({{"study", "model"},
         {"model", options.model},
         {"parameters", parameters},
         {"operation", r.operation},
         {r.unit + "_per_s", kernels},
         {"eager_" + r.unit + "_per_s", eager_rate},
         {"times_eager", kernels / eager_rate},
         {"eager_form", r.eager_form},
         {"seconds", {{"median", r.kernels.median}, {"min", r.kernels.min}, {"samples", r.kernels.samples}}},
         {"eager_seconds", {{"median", r.eager.median}, {"min", r.eager.min}, {"samples", r.eager.samples}}},
         {"shares", shares}});
}

double gradient_norm(const Tensor& loss, const std::vector<Tensor>& parameters) {
  double squares = 0.0;
  for (const auto& gradient : torch::autograd::grad({loss}, parameters)) {
    squares += gradient.to(torch::kDouble).square().sum().item<double>();
  }
  return std::sqrt(squares);
}

// Throws unless the kernels and the eager operator give the same number.
void require_agreement(const std::string& what, const Recurrences& recurrences, const std::function<double()>& number) {
  constexpr double kTolerance = 1e-4;
  recurrences.use_eager();
  const double eager = number();
  recurrences.use_kernels();
  const double kernels = number();
  if (!(std::abs(kernels - eager) <= kTolerance * std::abs(kernels))) {
    throw std::runtime_error(
        fmt::format("bench model: {}: {} with the kernels, {} with the eager form", what, kernels, eager));
  }
}

// Times step() with the kernels and with the eager operator in interleaved runs, then profiles the kernels. `callers`
// threads call LibTorch's operators.
ModelResult measure_by_turns(const Recurrences& recurrences, const std::function<void()>& step,
                             const ModelSpeedOptions& options, int callers) {
  ModelResult result;
  result.eager_form = name_of(recurrences.form());
  const auto timings = take_turns({[&] {
                                     recurrences.use_kernels();
                                     step();
                                   },
                                   [&] {
                                     recurrences.use_eager();
                                     step();
                                   }},
                                  options.rounds);
  result.kernels = timings[0];
  result.eager = timings[1];
  recurrences.use_kernels();
  result.shares = shares_of(step, callers);
  return result;
}

ModelResult train_language_model(const ModelSpeedOptions& options, const nn::LanguageModelConfig& config,
                                 const EagerForm& form) {
  std::vector<std::shared_ptr<nn::LanguageModel>> models;
  const auto make = [&] {
    models.push_back(std::make_shared<nn::LanguageModel>(config, nn::Initialiser(1)));
    return train::replica_of(models.back());
  };
  train::LmTrainOptions training;
  training.sequence_length = options.length;
  training.tokens_per_step = options.length * options.threads * kBatchesAThread;
  training.steps = std::int64_t{1} << 20;
  const RandomTokens tokens(16 * training.tokens_per_step, config.vocab_size);
  const io::TokenFolder corpus(tokens.path());
  const auto group = train::ProcessGroup::join({}, torch::kCPU);
  train::LmTask task(make, {&corpus, nullptr, {}}, training, *group);
  train::DataParallel copies(
      options.threads, [&] { return task.add_copy(); }, default_pool());
  train::Trainer trainer(task, copies, train::update_options(training), *group);
  Recurrences recurrences(form);
  for (const auto& model : models) recurrences.add(*model);
  const auto ids = torch::randint(config.vocab_size, {1, options.length + 1}, torch::kLong);
  require_agreement("training", recurrences, [&] {
    const auto& model = *models.front();
    return gradient_norm(model.loss(ids.slice(1, 0, options.length), ids.slice(1, 1)), model.parameters());
  });
  auto result = measure_by_turns(
      recurrences, [&] { trainer.step(); }, options, options.threads);
  group->shutdown();
  result.operation = "training";
  result.unit = "tokens";
  result.amount = static_cast<double>(training.tokens_per_step);
  return result;
}

ModelResult generate_text(const ModelSpeedOptions& options, const nn::LanguageModel& model) {
  auto state = model.initial_state(1);
  model.prefill(torch::randint(model.config().vocab_size, {1, kPrompt}, torch::kLong), state);
  Recurrences recurrences({});
  recurrences.add(model);
  require_agreement("generating", recurrences, [&] {
    auto copy = state.clone();
    return model.step(torch::zeros({1}, torch::kLong), copy).to(torch::kDouble).norm().item<double>();
  });
  auto ids = torch::zeros({1}, torch::kLong);
  const auto draw = [&] {
    for (std::int64_t n = 0; n < kDraws; ++n) ids = model.step(ids, state).argmax(1);
  };
  auto result = measure_by_turns(recurrences, draw, options, 1);
  result.eager_form = "one token";
  result.operation = "generating";
  result.unit = "tokens";
  result.amount = kDraws;
  return result;
}

void measure_language_model(const ModelSpeedOptions& options,
                            const std::function<void(const nlohmann::ordered_json&)>& write) {
  auto config = nn::language_model_preset(options.model);
  config.mixer = "efla";
  const nn::LanguageModel model(config, nn::Initialiser(1));
  const auto mixer = config.mixer_config();
  fmt::print("{}, {} parameters, {} threads\n", options.model, model.parameter_count(), options.threads);
  report_model(options, model.parameter_count(), generate_text(options, model), write);
  const auto form = fastest_form(1, options.length, mixer.heads, mixer.key_dim);
  report_model(options, model.parameter_count(), train_language_model(options, config, form), write);
}

void measure_classifier(const ModelSpeedOptions& options,
                        const std::function<void(const nlohmann::ordered_json&)>& write) {
  const nn::PixelClassifierConfig config;
  std::vector<std::shared_ptr<nn::PixelClassifier>> models;
  const auto make = [&] {
    models.push_back(std::make_shared<nn::PixelClassifier>(config, 1));
    return eval::Classifier{nn::named_parameters(*models.back()),
                            [model = models.back()](const Tensor& pixels) { return model->forward(pixels); }};
  };
  const auto images = data::builtin_digits(data::Split::train, kImages);
  train::ImageTraining training;
  training.epochs = 1000000;
  training.batch_size = kImages;
  const auto mixer = config.mixer_config();
  const auto form =
      fastest_form(eval::micro_batch(torch::kCPU), config.tokens, mixer.heads, config.hidden / mixer.heads);
  train::ImageTask task(make, images, images, training);
  train::DataParallel copies(
      options.threads, [&] { return task.add_copy(); }, default_pool());
  const auto group = train::ProcessGroup::join({}, torch::kCPU);
  train::Trainer trainer(task, copies, train::update_options(training), *group);
  const std::int64_t parameters = copies.parameters().size();
  fmt::print("{}, {} parameters, {} threads\n", options.model, parameters, options.threads);
  Recurrences recurrences(form);
  for (const auto& model : models) recurrences.add(*model);
  require_agreement("training", recurrences, [&] {
    const std::vector<std::uint32_t> first{0, 1};
    const auto& model = *models.front();
    return gradient_norm(model.forward(eval::make_batch(images, first).pixels).square().sum(), model.parameters());
  });
  auto result = measure_by_turns(
      recurrences, [&] { trainer.step(); }, options, options.threads);
  result.operation = "training";
  result.unit = "images";
  result.amount = static_cast<double>(kImages);
  report_model(options, parameters, result, write);
}

}  // namespace

void measure_model(const ModelSpeedOptions& options, const std::function<void(const nlohmann::ordered_json&)>& write) {
  libtorch::compute_on_this_thread_only();  // as in training and generating; the threads are for the operators
  if (options.model == kPixelClassifier) {
    measure_classifier(options, write);
  } else {
    measure_language_model(options, write);
  }
}

}  // namespace efla::bench
