#include "bench/model/gpu_model.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench/model/kernel_shares.h"
#include "bench/model/random_tokens.h"
#include "efla/base/error.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/torch/context.h"
#include "efla/torch/host_copy.h"
#include "efla/train/tasks/lm_task.h"
#include "efla/train/trainer.h"

namespace efla::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Shares = std::vector<std::pair<std::string, double>>;

constexpr std::int64_t kStepsPerRound = 10, kDrawsPerRound = 200, kPromptTokens = 256;

// Returns the seconds of each call of `run` in the median over rounds, after one round that warms up.
double seconds_per_call(const std::function<void()>& run, std::int64_t calls, int rounds) {
  std::vector<double> seconds;
  for (int round = 0; round <= rounds; ++round) {
    torch::cuda::synchronize();
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < calls; ++i) run();
    torch::cuda::synchronize();
    if (round > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + rounds / 2, seconds.end());
  return seconds[static_cast<std::size_t>(rounds / 2)] / static_cast<double>(calls);
}

// Returns the part of a model's step to which a kernel belongs.
std::string part_of_kernel(const std::string& name) {
  const auto holds = [&](std::initializer_list<const char*> parts) {
    return std::any_of(parts.begin(), parts.end(), [&](const char* part) { return name.find(part) != name.npos; });
  };
  if (holds({"sdpa", "flash_fwd", "flash_bwd", "fmha", "cudnn::fusion"})) return "softmax attention";
  if (holds({"nvjet", "gemm", "gemv", "cutlass", "splitK", "linear_kernel", "linear_many_kernel"}))
    return "matrix products";
  if (holds({"ShortConv"})) return "short convolution";
  if (holds({"RmsNorm"})) return "residual sums and RMS norms";
  if (holds({"Glu"})) return "SwiGLU";
  if (holds({"CrossEntropy"})) return "cross-entropy";
  if (holds({"efla::"})) return "delta rule";
  if (holds({"FusedAdam"})) return "optimiser";
  return "element by element, sums, copies";
}

// Returns when a kernel ran. LibTorch 2 counts in nanoseconds, LibTorch 1 in microseconds.
template <class Event>
KernelTime time_of(const Event& event) {
  double begin = 0.0, seconds = 0.0;
  if constexpr (requires { event.durationNs(); }) {
    begin = 1e-9 * static_cast<double>(event.startNs());
    seconds = 1e-9 * static_cast<double>(event.durationNs());
  } else {
    begin = 1e-6 * static_cast<double>(event.startUs());
    seconds = 1e-6 * static_cast<double>(event.durationUs());
  }
  return {part_of_kernel(event.name()), begin, begin + seconds};
}

// Returns the share of a call's time in each part, and the share in which no kernel ran.
Shares shares_of(const std::function<void()>& run) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  torch::cuda::synchronize();
  profiler::enableProfiler(config, activities);
  const auto start = Clock::now();
  run();
  torch::cuda::synchronize();
  const double all = std::chrono::duration<double>(Clock::now() - start).count();
  const auto result = profiler::disableProfiler();
  std::vector<KernelTime> kernels;
  for (const auto& event : result->events()) {
    if (event.deviceType() == c10::DeviceType::CUDA) kernels.push_back(time_of(event));
  }
  auto parts = seconds_of_parts(std::move(kernels));
  double busy = 0.0;
  for (auto& [part, seconds] : parts) busy += seconds /= all;
  parts["no kernel"] = 1.0 - busy;
  Shares sorted(parts.begin(), parts.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return sorted;
}

nlohmann::ordered_json print_shares(const Shares& shares) {
  nlohmann::ordered_json json;
  for (const auto& [part, share] : shares) {
    fmt::print("  {:5.1f} %  {}\n", 1e2 * share, part);
    json[part] = share;
  }
  std::fflush(stdout);
  return json;
}

// Returns the floating-point operations per second of large products in bfloat16.
double product_rate(const torch::Device& device) {
  constexpr std::int64_t kSize = 8192;
  const auto options = torch::TensorOptions(torch::kBFloat16).device(device);
  const auto a = torch::randn({kSize, kSize}, options), b = torch::randn({kSize, kSize}, options);
  const double seconds = seconds_per_call([&] { torch::matmul(a, b); }, 20, 5);
  return 2.0 * kSize * kSize * kSize / seconds;
}

nlohmann::ordered_json measure_training(const GpuModelOptions& options, const nn::LanguageModelConfig& config,
                                        const torch::Device& device) {
  std::shared_ptr<nn::LanguageModel> model;
  const auto make = [&] {
    model = std::make_shared<nn::LanguageModel>(config, nn::Initialiser(1));
    model->to(device);
    return train::replica_of(model);
  };
  train::LmTrainOptions training;
  training.sequence_length = options.length;
  training.micro_batch = options.batch;
  training.tokens_per_step = options.length * options.batch;
  training.steps = std::int64_t{1} << 20;
  training.precision = "bfloat16";
  const RandomTokens tokens(16 * training.tokens_per_step, config.vocab_size);
  const io::TokenFolder corpus(tokens.path());
  const auto group = train::ProcessGroup::join({}, device);
  train::LmTask task(make, {&corpus, nullptr, {}}, training, *group, device);
  train::DataParallel copies(
      1, [&] { return task.add_copy(); }, default_pool(), device, training.precision);
  train::Trainer trainer(task, copies, train::update_options(training), *group);
  const double seconds = seconds_per_call([&] { trainer.step(); }, kStepsPerRound, options.rounds);
  const auto amount = static_cast<double>(training.tokens_per_step);
  // The embeddings are looked up; two operations per weight and token forward, four backward.
  const auto weights = static_cast<double>(model->parameter_count() -
                                           (config.tie_word_embeddings ? 0 : config.vocab_size * config.hidden_size));
  const double of_products = 6.0 * weights * amount / seconds / product_rate(device);
  const double bytes = static_cast<double>(libtorch::most_bytes_allocated(libtorch::device_of(device)));
  fmt::print("training, {} x {} tokens: {:.0f} tokens/s, {:.1f} GiB, {:.0f} % of the rate of matrix products\n",
             options.batch, options.length, amount / seconds, bytes / (1 << 30), 1e2 * of_products);
  const auto shares = print_shares(shares_of([&] { trainer.step(); }));
  group->shutdown();
  return {{"operation", "training"},  {"batch", options.batch},
          {"length", options.length}, {"tokens_per_s", amount / seconds},
          {"memory_bytes", bytes},    {"share_of_product_rate", of_products},
          {"shares", shares}};
}

// Measures texts that are continued together, each with its most probable token.
nlohmann::ordered_json measure_generating(const GpuModelOptions& options, const nn::LanguageModel& model,
                                          nn::WeightType weights, std::int64_t texts) {
  const std::int64_t vocab_size = model.config().vocab_size;
  const nn::GpuDecoder decoder(model, weights, vocab_size);
  auto state = model.initial_state(texts);
  decoder.prefill(torch::randint(vocab_size, {texts, kPromptTokens}, torch::kLong), state);
  auto output = decoder.step(torch::zeros({texts}, torch::kLong), state);
  const auto draw = [&] {
    libtorch::HostCopy ids(output.likeliest);
    output = decoder.step_drawn(output.likeliest.select(1, 0).to(torch::kLong), state);
    ids.get();
  };
  const double seconds = seconds_per_call(draw, kDrawsPerRound, options.rounds);
  const double rate = static_cast<double>(texts) / seconds;
  fmt::print("generating {} {} with weights in {}: {:.0f} tokens/s\n", texts, texts == 1 ? "text" : "texts",
             nn::name_of(weights), rate);
  const auto shares = print_shares(shares_of([&] {
    for (int i = 0; i < kDrawsPerRound; ++i) draw();
  }));
  return {{"operation", "generating"},
          {"weights", nn::name_of(weights)},
          {"texts", texts},
          {"tokens_per_s", rate},
          {"shares", shares}};
}

}  // namespace

void measure_model_on_gpu(const GpuModelOptions& options,
                          const std::function<void(const nlohmann::ordered_json&)>& write) {
  auto config = nn::language_model_preset(options.model);
  config.mixer = options.mixer;
  const torch::Device device(torch::kCUDA, 0);
  std::int64_t parameters = 0;
  const auto report = [&](const nlohmann::ordered_json& result) {
    nlohmann::ordered_json line{
        {"study", "gpu-model"}, {"model", options.model}, {"mixer", options.mixer}, {"parameters", parameters}};
    line.update(result);
    write(line);
  };
  {
    nn::LanguageModel model(config, nn::Initialiser(1));
    model.to(device);
    parameters = model.parameter_count();
    fmt::print("{} with {}, {} parameters\n", options.model, options.mixer, parameters);
    for (const std::int64_t texts : {1, 64}) {
      for (const auto weights : {nn::WeightType::float32, nn::WeightType::bfloat16}) {
        report(measure_generating(options, model, weights, texts));
      }
    }
  }
  report(measure_training(options, config, device));
}

}  // namespace efla::bench
