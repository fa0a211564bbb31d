#include "bench/model/generation.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <future>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "efla/torch/host_copy.h"
#include "efla/torch/one_thread.h"

namespace efla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kShortest = 1024;  // first context
constexpr std::int64_t kWarmUp = 8;       // tokens drawn before the clock starts

// Keeps the times of a reply's tokens.
class Watch final : public engine::Listener {
 public:
  void token(const engine::Token& /*token*/) override { tokens_.push_back(Clock::now()); }
  void finish(const engine::Finish& finish) override { end_.set_value(finish); }

  // Waits for the end. Throws std::runtime_error for a reply that failed.
  engine::Finish end() {
    auto end = end_.get_future().get();
    if (end.reason == engine::FinishReason::error) throw std::runtime_error(end.error);
    return end;
  }
  // Returns the sorted milliseconds from token to token, for tokens [first, first + count), after the end.
  std::vector<double> steps(std::size_t first, std::size_t count) const {
    std::vector<double> ms;
    for (std::size_t i = first; i < first + count; ++i) {
      ms.push_back(std::chrono::duration<double, std::milli>(tokens_[i] - tokens_[i - 1]).count());
    }
    std::ranges::sort(ms);
    return ms;
  }

 private:
  std::vector<Clock::time_point> tokens_;
  std::promise<engine::Finish> end_;
};

constexpr const char* kContext = "context";  // the session that grows

// Reads random tokens. Returns the milliseconds until the next one is drawn.
double prefill(engine::Engine& engine, std::int64_t context, std::int64_t tokens, Random& random) {
  engine::Request request;
  for (std::int64_t i = 0; i < tokens; ++i) {
    request.prompt.push_back(
        static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(engine.info().vocab_size))));
  }
  if (context > 0) request.session = kContext;
  request.save_as = kContext;
  request.max_tokens = 1;
  request.sampling.temperature = 0.0;
  const auto watch = std::make_shared<Watch>();
  engine.submit(std::move(request), watch);
  const auto end = watch->end();
  return end.first_token_ms - end.queue_ms;
}

// Returns the sorted milliseconds of steps after the session's text. A step draws a token for each of `texts` copies.
std::vector<double> decode(engine::Engine& engine, std::int64_t draws, std::int64_t texts) {
  std::vector<std::shared_ptr<Watch>> watches;
  for (std::int64_t i = 0; i < texts; ++i) {
    engine::Request request;
    request.session = kContext;
    request.max_tokens = draws + kWarmUp + 2 * texts;  // texts may begin one after the other
    request.sampling.temperature = 0.0;
    watches.push_back(std::make_shared<Watch>());
    engine.submit(std::move(request), watches.back());
  }
  for (const auto& watch : watches) watch->end();
  return watches.back()->steps(static_cast<std::size_t>(kWarmUp + texts), static_cast<std::size_t>(draws));
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
  engine::EngineOptions engine_options;
  engine_options.state_memory = engine_options.session_memory = engine::kNoBound;
  engine_options.cache_memory = 0;
  engine_options.max_texts = options.texts;
  engine_options.keep_sessions = false;
  engine_options.on_gpu = device.is_cuda();
  engine_options.weights = options.weights;
  engine_options.kv_cache_type = options.kv_cache_type;
  engine_options.draft_tokens = 0;  // repetitions of random tokens say nothing
  engine_options.step_time = std::chrono::seconds(1);
  engine_options.threads = options.threads;
  const auto engine = options.model.start(engine_options);
  const std::string name = options.model.name(), kind = options.model.kind();
  const std::int64_t parameters = engine->info().parameters;
  fmt::print("{} with {}, {} parameters\n", name, kind, parameters);
  fmt::print("{:>9}{:>18}{:>13}{:>9}{:>9}{:>14}{:>14}\n", "context", "prefill tokens/s", "ms per step", "least", "90 %",
             "state bytes", "resident MB");
  Random random(1);
  prefill(*engine, 0, std::min(kShortest, options.longest), random);
  decode(*engine, kWarmUp, options.texts);
  std::int64_t read = 0;
  for (const auto context : contexts_up_to(options.longest)) {
    const auto tokens = context - read;
    const double rate = 1e3 * static_cast<double>(tokens) / prefill(*engine, read, tokens, random);
    read = context;
    const auto ms = decode(*engine, options.draws, options.texts);
    const auto state_bytes =
        engine->info().session_bytes + static_cast<std::size_t>(context) * engine->info().token_bytes;
    const double median = ms[ms.size() / 2], p90 = ms[ms.size() * 9 / 10];
    fmt::print("{:>9}{:>18.0f}{:>13.3f}{:>9.3f}{:>9.3f}{:>14}{:>14.1f}\n", context, rate, median, ms.front(), p90,
               state_bytes, static_cast<double>(resident_bytes()) / 1e6);
    std::fflush(stdout);
    write({{"study", "generation"},
           {"preset", name},
           {"mixer", kind},
           {"weights", options.weights},
           {"kv_cache_type", engine->info().kv_cache_type},
           {"texts", options.texts},
           {"device", device.str()},
           {"parameters", parameters},
           {"context", context},
           {"prefill_tokens_per_s", rate},
           {"ms_per_step", {{"median", median}, {"min", ms.front()}, {"p90", p90}}},
           {"draws", options.draws},
           {"state_bytes", state_bytes},
           {"resident_bytes", resident_bytes()}});
  }
}

}  // namespace efla::bench
