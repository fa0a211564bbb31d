#include "bench/serving.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "efla/base/error.h"
#include "efla/base/statistics.h"
#include "efla/torch/one_thread.h"

namespace efla::bench {
namespace {

using engine::Clock;

constexpr std::size_t kStateMemoryOnGpu = std::size_t{8} << 30;  // bytes; a GPU is measured with many texts

double elapsed_ms(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Counts the tokens of several replies while all of them run: from the first token of the last reply to begin, so that
// no prompt is timed, to the end of the first reply to end.
class Group {
 public:
  explicit Group(std::int64_t size) : size_(size) {}

  void begun() {
    const std::lock_guard lock(mutex_);
    if (++begun_ == size_) start_ = Clock::now();
  }
  void token() {
    const std::lock_guard lock(mutex_);
    if (begun_ == size_) ++tokens_;
  }
  void ended() {
    const std::lock_guard lock(mutex_);
    if (++ended_ == 1) {
      ms_ = elapsed_ms(start_);
      counted_ = tokens_;
    }
    changed_.notify_all();
  }
  // Returns tokens per second of all replies together, while all of them ran.
  double rate() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == size_; });
    return 1e3 * static_cast<double>(counted_) / ms_;
  }

 private:
  std::int64_t size_, begun_ = 0, ended_ = 0, tokens_ = 0, counted_ = 0;
  double ms_ = 0.0;
  Clock::time_point start_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Counter final : public engine::Listener {
 public:
  explicit Counter(Group& group) : group_(group) {}
  void token(const engine::Token&) override {
    if (first_) {
      first_ = false;
      group_.begun();
    } else {
      group_.token();
    }
  }
  void finish(const engine::Finish&) override { group_.ended(); }

 private:
  Group& group_;
  bool first_ = true;
};

engine::Request request(std::int64_t tokens, std::int32_t id) {
  engine::Request request;
  request.prompt = {id};
  request.max_tokens = tokens;
  request.sampling.temperature = 0.0;
  return request;
}

double tokens_per_second(engine::Engine& engine, std::int64_t sessions, std::int64_t tokens) {
  Group group(sessions);
  for (std::int64_t i = 0; i < sessions; ++i) {
    const auto id = static_cast<std::int32_t>(i % engine.info().vocab_size);
    engine.submit(request(tokens, id), std::make_shared<Counter>(group));
  }
  return group.rate();
}

// Times forks, saves and loads of one session.
void measure_sessions(engine::Engine& engine, const ServingOptions& options,
                      const std::function<void(const nlohmann::ordered_json&)>& write) {
  constexpr int kTimes = 7;
  Group group(1);
  auto first = request(2, 0);
  first.save_as = "text";
  engine.submit(first, std::make_shared<Counter>(group));
  group.rate();
  std::vector<double> fork, save, load;
  for (int i = 0; i < kTimes; ++i) {
    auto start = Clock::now();
    engine.fork("text", "copy" + std::to_string(i));
    fork.push_back(elapsed_ms(start));
    start = Clock::now();
    const auto bytes = engine.save("text");
    save.push_back(elapsed_ms(start));
    start = Clock::now();
    engine.load("loaded", bytes);
    load.push_back(elapsed_ms(start));
  }
  const auto bytes = engine.info().session_bytes;
  fmt::print("session of {} bytes: fork {:.3f} ms, save {:.3f} ms, load {:.3f} ms\n", bytes, median(fork), median(save),
             median(load));
  write({{"study", "serving sessions"},
         {"preset", options.model.name()},
         {"session_bytes", bytes},
         {"ms", {{"fork", median(fork)}, {"save", median(save)}, {"load", median(load)}}}});
}

}  // namespace

void measure_serving(const ServingOptions& options, const std::function<void(const nlohmann::ordered_json&)>& write) {
  libtorch::compute_on_this_thread_only();
  std::map<std::string, std::unique_ptr<engine::Engine>> engines;
  for (const auto& weights : options.weights) {
    engine::EngineOptions engine{.cache_memory = 0, .weights = weights, .draft_tokens = 0, .threads = options.threads};
    engine.on_gpu = options.on_gpu;
    if (options.on_gpu) engine.state_memory = kStateMemoryOnGpu;
    engines[weights] = options.model.start(engine);
  }
  const std::int64_t parameters = engines.begin()->second->info().parameters;
  // Replies that wait for a slot would begin after others have ended.
  for (const auto& [weights, engine] : engines) {
    for (const auto sessions : options.sessions) {
      if (const auto slots = engine->statistics().slots; sessions > slots) {
        throw Error("bench serve", "--sessions", std::to_string(sessions),
                    "at most " + std::to_string(slots) + " texts at once");
      }
    }
  }
  fmt::print("{}, {} parameters\n", options.model.name(), parameters);
  std::map<std::pair<std::string, std::int64_t>, std::vector<double>> rates;
  for (int round = 0; round < options.rounds; ++round) {
    for (const auto& weights : options.weights) {
      for (const auto sessions : options.sessions) {
        rates[{weights, sessions}].push_back(tokens_per_second(*engines[weights], sessions, options.tokens));
      }
    }
  }
  fmt::print("{:>10}{:>10}{:>14}{:>12}{:>12}\n", "weights", "sessions", "tokens/s", "least", "most");
  for (const auto& weights : options.weights) {
    for (const auto sessions : options.sessions) {
      const auto& all = rates[{weights, sessions}];
      const double least = *std::min_element(all.begin(), all.end()), most = *std::max_element(all.begin(), all.end());
      fmt::print("{:>10}{:>10}{:>14.1f}{:>12.1f}{:>12.1f}\n", weights, sessions, median(all), least, most);
      write({{"study", "serving"},
             {"preset", options.model.name()},
             {"parameters", parameters},
             {"device", options.on_gpu ? "cuda" : "cpu"},
             {"weights", weights},
             {"sessions", sessions},
             {"tokens_per_s", {{"median", median(all)}, {"min", least}, {"max", most}}},
             {"tokens", options.tokens}});
    }
  }
  measure_sessions(*engines.begin()->second, options, write);
  std::fflush(stdout);
}

}  // namespace efla::bench
