#include "bench/generation.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "efla/base/random.h"
#include "efla/generate/generator.h"
#include "efla/generate/session.h"

namespace efla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPrefillPiece = 65536;  // ids made at a time
constexpr std::int64_t kWarmUp = 8;            // tokens drawn before any is timed

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Takes in random tokens; returns ms.
double prefill(const nn::LanguageModel& model, std::int64_t tokens, Random& random, generate::Session& session) {
  double ms = 0.0;
  while (tokens > 0) {
    const auto count = std::min(tokens, kPrefillPiece);
    const auto ids = torch::empty({1, count}, torch::kLong);
    for (std::int64_t i = 0; i < count; ++i) {
      ids.data_ptr<std::int64_t>()[i] = random.below(static_cast<std::uint32_t>(model.config().vocab_size));
    }
    const auto start = Clock::now();
    model.prefill(ids, session.state);
    ms += ms_since(start);
    tokens -= count;
  }
  return ms;
}

// ms of each token drawn after the session's text.
std::vector<double> decode(const nn::LanguageModel& model, std::int64_t draws, generate::Session session) {
  std::vector<double> ms;
  session.pending = {0};
  for (std::int64_t n = 0; n < draws; ++n) {
    const auto start = Clock::now();
    generate::next_id(model, session, {}, model.config().vocab_size);
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

}  // namespace

void measure_generation(const nn::LanguageModel& model, const std::vector<std::int64_t>& contexts, std::int64_t draws,
                        const std::function<void(const AtContext&)>& write) {
  Random random(1);
  {
    generate::Session session(model, 0);
    prefill(model, contexts.front(), random, session);
    decode(model, kWarmUp, session.clone());
  }
  generate::Session session(model, 0);
  for (const auto context : contexts) {
    const auto tokens = context - session.state.tokens;
    const double prefill_ms = prefill(model, tokens, random, session);
    const auto ms = decode(model, draws, session.clone());
    write({context, 1e3 * static_cast<double>(tokens) / prefill_ms, ms[ms.size() / 2], ms.front(),
           ms[ms.size() * 9 / 10], session.state.bytes(), resident_bytes()});
  }
}

}  // namespace efla::bench
