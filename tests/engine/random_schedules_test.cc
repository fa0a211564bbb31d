// Random schedules: every reply, and every rewind, is the same as of the same request alone. Texts of hybrids take
// pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "tests/engine/family_model.h"
#include "tests/engine/recorder.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

constexpr int kRequests = 18;

// Prompts that begin alike, replies of all kinds. Request i with i % 6 == 5 continues the session of request i − 1, and
// one with i % 6 == 1 has two replies.
std::vector<Request> random_requests(std::uint64_t seed) {
  Random random(seed);
  std::vector<std::vector<std::int32_t>> beginnings;
  for (int i = 0; i < 3; ++i) {
    auto ids = i > 0 ? beginnings[0] : std::vector<std::int32_t>();
    if (i > 0) ids.resize(100);
    while (ids.size() < 210) ids.push_back(static_cast<std::int32_t>(random.below(256)));
    beginnings.push_back(ids);
  }
  std::vector<Request> requests;
  for (int i = 0; i < kRequests; ++i) {
    Request request;
    if (i % 6 != 5) {
      request.prompt = beginnings[random.below(3)];
      request.prompt.resize(1 + random.below(210));
    }
    for (auto more = random.below(90); more > 0; --more) {
      request.prompt.push_back(static_cast<std::int32_t>(random.below(256)));
    }
    request.max_tokens = random.below(4) == 0 ? random.below(2) : 1 + random.below(14);
    request.sampling.temperature = random.below(3) == 0 ? 0.0 : 1.3;
    request.sampling.top_p = random.below(2) == 0 ? 0.9 : 1.0;
    request.sampling.frequency_penalty = random.below(2) == 0 ? 0.5 : 0.0;
    request.sampling.repetition_penalty = random.below(2) == 0 ? 1.2 : 1.0;
    request.sampling.logit_bias = {{static_cast<std::int32_t>(random.below(256)), -100.0}};
    request.sampling.seed = random.bits();
    if (random.below(3) == 0) request.logprobs = random.below(4);
    request.echo = random.below(4) == 0;
    if (random.below(2) == 0) request.stop = {std::string(1, static_cast<char>('a' + random.below(26)))};
    request.client = std::string(1, static_cast<char>('A' + random.below(3)));
    if (random.below(2) == 0) request.end_turn = "\nUser: ";  // of requests that are stored
    if (i % 6 == 4) request.save_as = "s" + std::to_string(i);
    if (i % 6 == 5) request.session = request.save_as = "s" + std::to_string(i - 1);
    requests.push_back(std::move(request));
  }
  return requests;
}

// Returns the request whose reply is the second one to another request.
Request second_of(Request request) {
  ++request.sampling.seed;
  request.echo = false;
  return request;
}

std::map<std::string, std::string> saved(Engine& engine) {
  std::map<std::string, std::string> all;
  for (const auto& session : engine.sessions()) all[session.name] = engine.save(session.name);
  return all;
}

// Returns a part of the session's last request: of its reply, or of its prompt too.
std::int64_t tokens_to_rewind(const SessionInfo& session) { return (session.rewindable + 2) / 3; }

// Changes most requests so that a GPU draws their tokens, all with the same options.
std::vector<Request> mostly_drawn_on_gpu(std::vector<Request> requests) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i % 5 == 0) continue;
    RequestSampling plain;
    plain.temperature = 1.3;
    plain.seed = requests[i].sampling.seed;
    requests[i].sampling = plain;
    requests[i].logprobs = -1;
  }
  return requests;
}

// Runs the requests alone, and in random schedules. same_bits: otherwise only the tokens must be the same.
void expect_schedules_change_nothing(const std::function<std::unique_ptr<Engine>(const EngineOptions&)>& make,
                                     const std::vector<Request>& requests, std::uint64_t schedules, bool same_bits) {
  constexpr std::size_t kMostTokens = 8 * 64;  // of a text
  const auto next = make({});
  const auto slot = next->statistics().slot_bytes + kMostTokens * next->info().token_bytes;
  std::vector<Record> alone;
  std::map<int, Record> second;  // replies
  std::map<std::string, std::string> sessions, rewound;
  {
    const auto engine =
        make({.state_memory = 2 * slot, .cache_memory = 0, .draft_tokens = 0, .step_tokens = 64, .threads = 1});
    for (int i = 0; i < kRequests; ++i) {
      alone.push_back(reply(*engine, requests[i]));
      if (i % 6 == 1) second[i] = reply(*engine, second_of(requests[i]));
    }
    sessions = saved(*engine);
    for (const auto& session : engine->sessions()) rewind(*engine, session.name, tokens_to_rewind(session));
    rewound = saved(*engine);
  }
  EXPECT_EQ(sessions.size(), 3U);
  for (const auto& record : alone) EXPECT_EQ(record.error, "");

  const auto expect_sessions = [&](Engine& engine, const std::map<std::string, std::string>& expected,
                                   std::uint64_t schedule) {
    const auto found = saved(engine);
    EXPECT_TRUE(!same_bits || found == expected) << "schedule " << schedule;
    EXPECT_EQ(found.size(), expected.size()) << "schedule " << schedule;
    for (const auto& [name, bytes] : found) {
      next->load(name, bytes);
      EXPECT_EQ(next->save(name), bytes) << "schedule " << schedule;
    }
  };
  std::uint64_t hits = 0;
  for (std::uint64_t seed = 0; seed < schedules; ++seed) {
    Random random(100 + seed);
    const test::TempFolder folder;
    EngineOptions options;
    options.state_memory = slot * (2 + random.below(12));
    options.cache_memory = random.below(3) == 0 ? 0 : slot * (1 + random.below(30));
    options.draft_tokens = random.below(8);
    options.step_tokens = 64 * (1 + random.below(6));
    options.threads = 1 + static_cast<int>(random.below(2));
    options.swap = folder.path();
    if (random.below(2) == 0) options.session_memory = 8'000;  // every session is swapped
    const auto engine = make(options);
    std::vector<int> order;
    for (int i = 0; i < kRequests; ++i) order.insert(order.begin() + random.below(i + 1), i);
    std::vector<std::shared_ptr<Recorder>> recorders(kRequests);
    std::map<int, std::shared_ptr<Recorder>> seconds;
    const auto submit = [&](int i) {
      // Noise that is cancelled at some time.
      Request noise = requests[random.below(kRequests)];
      noise.session = noise.save_as = "";
      if (noise.prompt.empty()) noise.prompt = {1};
      const auto noisy = std::make_shared<Recorder>();
      const auto id = engine->submit(noise, noisy);
      recorders[i] = std::make_shared<Recorder>();
      std::vector<std::shared_ptr<Listener>> listeners{recorders[i]};
      if (i % 6 == 1) listeners.push_back(seconds[i] = std::make_shared<Recorder>());
      engine->submit(requests[i], listeners);
      if (random.below(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
      engine->cancel(id);
    };
    for (const int i : order) {
      if (i % 6 != 5) submit(i);
    }
    for (const int i : order) {
      if (i % 6 != 5) continue;
      recorders[i - 1]->record();
      submit(i);
    }
    for (int i = 0; i < kRequests; ++i) {
      const Record& record = recorders[i]->record();
      EXPECT_EQ(record.ids, alone[i].ids) << "schedule " << seed << " " << i;
      EXPECT_EQ(record.reason, alone[i].reason) << "schedule " << seed << " " << i;
      EXPECT_TRUE(!same_bits || record == alone[i]) << "schedule " << seed << " " << i;
    }
    for (const auto& [i, recorder] : seconds) {
      EXPECT_EQ(recorder->record().ids, second.at(i).ids) << "schedule " << seed << " " << i;
      EXPECT_TRUE(!same_bits || recorder->record() == second.at(i)) << "schedule " << seed << " " << i;
    }
    expect_sessions(*engine, sessions, seed);
    for (const auto& [name, bytes] : sessions) engine->fork(name, "of-" + name);
    recorders.clear();
    for (const auto& session : engine->sessions()) {
      if (!sessions.contains(session.name)) continue;
      Request noise = requests[random.below(kRequests)];
      noise.session = noise.save_as = "";
      if (noise.prompt.empty()) noise.prompt = {1};
      for (const auto& request : {noise, rewind_of(session.name, tokens_to_rewind(session))}) {
        recorders.push_back(std::make_shared<Recorder>());
        engine->submit(request, recorders.back());
      }
    }
    for (const auto& recorder : recorders) EXPECT_EQ(recorder->record().error, "");
    for (const auto& [name, bytes] : sessions) {  // what was forked is as it was
      EXPECT_TRUE(!same_bits || engine->save("of-" + name) == bytes) << "schedule " << seed;
      engine->erase("of-" + name);
    }
    expect_sessions(*engine, rewound, seed);
    hits += engine->statistics().cache_hits;
  }
  EXPECT_GT(hits, 0U);
}

TEST(Schedule, EveryReplyHasTheBitsOfTheSameRequestAlone) {
  expect_schedules_change_nothing([](const EngineOptions& options) { return tiny_engine(options); }, random_requests(1),
                                  12, true);
}

TEST(Schedule, EveryReplyOfAHybridHasTheBitsOfTheSameRequestAlone) {
  for (const bool olmo : {false, true}) {
    const FamilyFolder folder(olmo);
    for (const std::string type : {"float32", "bfloat16"}) {
      const auto make = [&](EngineOptions options) {
        options.kv_cache_type = type;
        return folder.engine(options);
      };
      expect_schedules_change_nothing(make, random_requests(2), 5, true);
    }
  }
}

TEST(Schedule, EveryReplyWithAHeadForDraftsHasTheBitsOfTheSameRequestAlone) {
  const FamilyFolder folder(false, std::vector<std::string>{"linear_attention", "full_attention"}, true);
  const auto make = [&](EngineOptions options) {
    options.draft_head = std::max<std::int64_t>(1, options.draft_tokens);
    return folder.engine(options);
  };
  expect_schedules_change_nothing(make, random_requests(3), 5, true);
}

TEST(Schedule, EveryReplyOfTheDecoderOfGpusHasTheTokensOfTheSameRequestAlone) {
  expect_schedules_change_nothing(gpu_engine, mostly_drawn_on_gpu(random_requests(1)), 6, false);
}

}  // namespace
}  // namespace efla::engine
