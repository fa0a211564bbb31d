#include "bench/model/generation.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <vector>

#include "efla/base/random.h"
#include "efla/generate/advance.h"
#include "efla/generate/session.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/rule/mixer_preset.h"
#include "efla/torch/host_copy.h"
#include "efla/torch/one_thread.h"

namespace efla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kShortest = 1024;       // first context
constexpr std::int64_t kPrefillPiece = 65536;  // ids drawn at a time
constexpr std::int64_t kWarmUp = 8;            // tokens drawn before the clock starts

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// What computes a step, as in efla generate: on a CPU the InferenceModel, if it takes the model; on a GPU the decoder.
struct Decoding {
  const nn::LanguageModel& model;
  std::unique_ptr<nn::InferenceModel> inference;
  std::unique_ptr<nn::GpuDecoder> decoder;

  generate::Advance advance(generate::Session& session) const {
    return {model, inference.get(), decoder.get(), session};
  }
};

// Prefills random tokens. Returns milliseconds.
double prefill(const Decoding& decoding, std::int64_t tokens, Random& random, generate::Session& session) {
  double ms = 0.0;
  generate::Advance advance = decoding.advance(session);
  while (tokens > 0) {
    const auto count = std::min(tokens, kPrefillPiece);
    for (std::int64_t i = 0; i < count; ++i) {
      session.pending.push_back(random.below(static_cast<std::uint32_t>(decoding.model.config().vocab_size)));
    }
    const auto start = Clock::now();
    advance.take(session.pending.size(), /*decode=*/false).to(torch::kCPU);  // waits for a GPU
    ms += ms_since(start);
    tokens -= count;
  }
  return ms;
}

// Returns the sorted milliseconds of steps after the session's text. A step draws a token for each of `texts` copies.
std::vector<double> decode(const Decoding& decoding, std::int64_t draws, std::int64_t texts,
                           generate::Session session) {
  const std::vector<const nn::LanguageModelState*> states(static_cast<std::size_t>(texts), &session.state);
  auto joined = texts > 1 ? nn::LanguageModelState::joined(states) : nn::LanguageModelState{};
  session.pending = {0};
  generate::Advance advance = decoding.advance(session);
  nn::GpuDecoder::Output output;
  if (texts > 1) output = decoding.decoder->step(torch::zeros({texts}, torch::kLong), joined);
  std::vector<double> ms;
  for (std::int64_t n = 0; n < draws; ++n) {
    const auto start = Clock::now();
    if (texts == 1) {
      advance.draw({}, decoding.model.config().vocab_size, /*decode=*/true, /*ahead=*/true);
    } else {  // as efla generate continues several texts
      libtorch::HostCopy ids(output.likeliest);
      output = decoding.decoder->step_drawn(output.likeliest.select(1, 0).to(torch::kLong), joined);
      ids.get();
    }
    ms.push_back(ms_since(start));
  }
  std::sort(ms.begin(), ms.end());
  return ms;
}

std::int64_t resident_bytes() {
  std::int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::vector<std::int64_t> contexts_up_to(std::int64_t longest) {
  std::vector<std::int64_t> contexts;
  for (std::int64_t context = kShortest; context < longest; context *= 4) contexts.push_back(context);
  contexts.push_back(longest);
  return contexts;
}

}  // namespace

void measure_generation(const GenerationOptions& options, const c10::Device& device,
                        const std::function<void(const nlohmann::ordered_json&)>& write) {
  libtorch::compute_on_this_thread_only();  // as efla generate does
  auto config = nn::language_model_preset(options.preset);
  config.mixer = mixer_preset(options.mixer).name;
  nn::LanguageModel model(config, nn::Initialiser(1));
  model.to(device);
  Decoding decoding{model, {}, {}};
  if (device.is_cuda()) {
    const auto weights = nn::parse_weight_type(options.weights);
    nn::round_weights(model, weights);
    decoding.decoder = std::make_unique<nn::GpuDecoder>(model, weights, config.vocab_size);
  } else if (nn::InferenceModel::refusal(config).empty()) {
    decoding.inference = std::make_unique<nn::InferenceModel>(model, nn::WeightType::float32);
  }
  fmt::print("{} with {}, {} parameters\n", options.preset, options.mixer, model.parameter_count());
  fmt::print("{:>9}{:>18}{:>13}{:>9}{:>9}{:>14}{:>14}\n", "context", "prefill tokens/s", "ms per step", "least", "90 %",
             "state bytes", "resident MB");
  Random random(1);
  {
    generate::Session session(model, 0);
    prefill(decoding, std::min(kShortest, options.longest), random, session);
    decode(decoding, kWarmUp, options.texts, session.clone());
  }
  generate::Session session(model, 0);
  for (const auto context : contexts_up_to(options.longest)) {
    const auto tokens = context - session.state.tokens;
    const double rate = 1e3 * static_cast<double>(tokens) / prefill(decoding, tokens, random, session);
    const auto ms = decode(decoding, options.draws, options.texts, session.clone());
    const double median = ms[ms.size() / 2], p90 = ms[ms.size() * 9 / 10];
    fmt::print("{:>9}{:>18.0f}{:>13.3f}{:>9.3f}{:>9.3f}{:>14}{:>14.1f}\n", context, rate, median, ms.front(), p90,
               session.state.bytes(), static_cast<double>(resident_bytes()) / 1e6);
    std::fflush(stdout);
    write({{"study", "generation"},
           {"preset", options.preset},
           {"mixer", options.mixer},
           {"weights", options.weights},
           {"texts", options.texts},
           {"device", device.str()},
           {"parameters", model.parameter_count()},
           {"context", context},
           {"prefill_tokens_per_s", rate},
           {"ms_per_step", {{"median", median}, {"min", ms.front()}, {"p90", p90}}},
           {"draws", options.draws},
           {"state_bytes", session.state.bytes()},
           {"resident_bytes", resident_bytes()}});
  }
}

}  // namespace efla::bench
