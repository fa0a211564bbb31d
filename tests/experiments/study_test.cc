// The runner of studies: runs side by side, entries kept, runs that depend on others, stops.
#include "experiments/common/study.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "efla/io/json.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::experiments {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

StudyEvents quiet() {
  return {[] { return false; }, [](double, const std::string&) {}, [](const std::string&) {}};
}

// A study of runs 0 … n − 1, which count how often they are executed.
Study counting_study(int n, std::atomic<int>& executed) {
  Study study{"counting", {{"n", n}}, {}, {}, [](const ordered_json& entry) { return entry.dump(); }, {}};
  for (int i = 0; i < n; ++i) {
    study.runs.push_back({std::to_string(i), {{"i", i}}, [i, &executed](const fs::path&, const RunContext& context) {
                            ++executed;
                            context.progress(0.5, "half");
                            return std::optional<ordered_json>(ordered_json{{"square", i * i}});
                          }});
  }
  return study;
}

TEST(Study, KeepsEntriesInTheOrderOfTheRuns) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  const auto study = counting_study(7, executed);
  ThreadPool pool(3);
  auto events = quiet();
  double share = 0.0;
  std::vector<std::string> lines;
  events.progress = [&](double s, const std::string&) { share = std::max(share, s); };
  events.line = [&](const std::string& text) { lines.push_back(text); };
  const auto entries = run_study(study, folder.path(), pool, events);
  ASSERT_TRUE(entries.has_value());
  for (int i = 0; i < 7; ++i) EXPECT_EQ((*entries)[i].at("square"), i * i);
  EXPECT_EQ(executed, 7);
  EXPECT_GT(share, 0.0);
  EXPECT_LE(share, 1.0);
  ASSERT_EQ(lines.size(), 7U);
  EXPECT_TRUE(lines.back().starts_with("7 of 7: ")) << lines.back();
  EXPECT_EQ(io::read_json(folder.path() / "runs/2/result.json"), nlohmann::json({{"square", 4}}));
  EXPECT_EQ(run_study(study, folder.path(), pool, events), entries);
  EXPECT_EQ(executed, 7) << "a run with a result was executed again";
}

TEST(Study, RefusesTwoRunsOfOneName) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  auto study = counting_study(2, executed);
  study.runs[1].name = study.runs[0].name;
  ThreadPool pool(1);
  test::expect_error([&] { run_study(study, folder.path(), pool, quiet()); }, "runs", "two named 0");
  EXPECT_EQ(executed, 0);
}

TEST(Study, ExecutesRunsThatDependOnTheFirst) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  auto study = counting_study(2, executed);
  study.more = [&](const std::vector<ordered_json>& entries) {
    EXPECT_EQ(entries.size(), 2U);
    return std::vector<StudyRun>{{"last", {}, [](const fs::path&, const RunContext&) {
                                    return std::optional<ordered_json>(ordered_json{{"square", -1}});
                                  }}};
  };
  ThreadPool pool(2);
  const auto entries = run_study(study, folder.path(), pool, quiet());
  ASSERT_TRUE(entries.has_value());
  ASSERT_EQ(entries->size(), 3U);
  EXPECT_EQ(entries->back().at("square"), -1);
}

TEST(Study, ThatFillsAGpuExecutesOneRunAfterTheOther) {
  const test::TempFolder folder;
  std::atomic<int> running = 0, most = 0;
  Study study{"filling", {}, {}, {}, [](const ordered_json&) { return std::string(); }, {}, true};
  for (int i = 0; i < 4; ++i) {
    study.runs.push_back({std::to_string(i), {}, [&](const fs::path&, const RunContext& context) {
                            most = std::max<int>(most, ++running);
                            // A run has the pool for itself.
                            context.pool.run(3, [](std::int64_t, int) {});
                            --running;
                            return std::optional<ordered_json>(ordered_json{{"done", true}});
                          }});
  }
  ThreadPool pool(3);
  EXPECT_TRUE(run_study(study, folder.path(), pool, quiet(), {Device::Kind::cuda}).has_value());
  EXPECT_EQ(most, 1);
}

TEST(Study, ExecutesRunsAgainThatHadTooLittleMemoryBesideOthers) {
  const test::TempFolder folder;
  constexpr int kRuns = 4;
  std::atomic<int> tries = 0, running = 0, most_again = 0;
  Study study{"large", {}, {}, {}, [](const ordered_json&) { return std::string(); }, {}};
  for (int i = 0; i < kRuns; ++i) {
    study.runs.push_back({std::to_string(i), {}, [&, i](const fs::path&, const RunContext&) {
                            const int number = ++tries;
                            if (number <= kRuns) {
                              while (tries < kRuns) std::this_thread::yield();  // all are side by side
                              if (i > 0) throw std::runtime_error("CUDA out of memory. Tried to allocate 2.00 GiB");
                            } else {
                              most_again = std::max<int>(most_again, ++running);
                              std::this_thread::sleep_for(std::chrono::milliseconds(20));
                              --running;
                            }
                            return std::optional<ordered_json>(ordered_json{{"i", i}});
                          }});
  }
  ThreadPool pool(kRuns);
  int postponed = 0;
  auto events = quiet();
  events.line = [&](const std::string& text) { postponed += text.find("continues after them") != std::string::npos; };
  const auto entries = run_study(study, folder.path(), pool, events, {Device::Kind::cuda});
  ASSERT_TRUE(entries.has_value());
  EXPECT_EQ(postponed, kRuns - 1);
  for (int i = 0; i < kRuns; ++i) EXPECT_EQ((*entries)[i].at("i"), i);
  EXPECT_EQ(tries, 2 * kRuns - 1);
  EXPECT_LE(most_again, kRuns / 2);
}

TEST(Study, ThatHasTooLittleMemoryForOneRunEnds) {
  const test::TempFolder folder;
  Study study{"too large", {}, {}, {}, [](const ordered_json&) { return std::string(); }, {}};
  study.runs.push_back({"0", {}, [](const fs::path&, const RunContext&) -> std::optional<ordered_json> {
                          throw std::runtime_error("CUDA out of memory. Tried to allocate 2.00 GiB");
                        }});
  ThreadPool pool(3);
  EXPECT_THROW(run_study(study, folder.path(), pool, quiet(), {Device::Kind::cuda}), std::runtime_error);
}

TEST(Study, NeedsOnlyTheResultsOfFinishedRuns) {
  const test::TempFolder folder, travelled;
  std::atomic<int> executed = 0;
  const auto study = counting_study(3, executed);
  ThreadPool pool(1);
  const auto entries = run_study(study, folder.path(), pool, quiet());
  for (const char* run : {"0", "2"}) {
    fs::create_directories(travelled.path() / "runs" / run);
    fs::copy(folder.path() / "runs" / run / "result.json", travelled.path() / "runs" / run / "result.json");
  }
  EXPECT_EQ(run_study(study, travelled.path(), pool, quiet()), entries);
  EXPECT_EQ(executed, 4) << "one run lacked its result";
}

TEST(Study, RefusesAResultThatIsNotTheRuns) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  auto study = counting_study(1, executed);
  study.check = [](const io::Fields& entry) { entry.get<std::int64_t>("square"); };
  ThreadPool pool(1);
  const auto file = folder.path() / "runs/0/result.json";
  fs::create_directories(file.parent_path());
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "got [], expected an object"},
           {"{}", "square: got nothing, expected a whole number"},
           {R"({"name": "7", "square": 0})", R"(name: got "7", expected "0", as its folder)"}}) {
    test::write_text(file, text);
    test::expect_bad_content([&] { run_study(study, folder.path(), pool, quiet()); }, -1, says);
  }
  test::write_text(file, R"({"name": "0", "square": 0})");
  EXPECT_TRUE(run_study(study, folder.path(), pool, quiet()).has_value());
  EXPECT_EQ(executed, 0);
}

TEST(Study, StopsAndContinues) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  auto study = counting_study(4, executed);
  bool stop = true;
  auto events = quiet();
  events.stop = [&] { return executed == 2 && stop; };
  ThreadPool pool(1);
  EXPECT_FALSE(run_study(study, folder.path(), pool, events).has_value());
  EXPECT_EQ(executed, 2);
  stop = false;
  EXPECT_TRUE(run_study(study, folder.path(), pool, events).has_value());
  EXPECT_EQ(executed, 4);
}

TEST(Study, TidiesWhatKilledProcessesLeft) {
  const test::TempFolder folder;
  std::atomic<int> executed = 0;
  auto study = counting_study(1, executed);
  study.runs[0].tidy = [](const fs::path& run) { fs::remove(run / "checkpoint"); };
  ThreadPool pool(1);
  EXPECT_TRUE(run_study(study, folder.path(), pool, quiet()).has_value());
  const auto run = folder.path() / "runs/0";
  // As after a kill once the entry was kept.
  for (const char* name : {"checkpoint", ".efla-lock", ".result.json.tmp-999999999-0"})
    test::write_text(run / name, "");
  EXPECT_TRUE(run_study(study, folder.path(), pool, quiet()).has_value());
  EXPECT_EQ(executed, 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(run), fs::directory_iterator()), 1) << "result.json";
}

TEST(Study, DescribesItsSettingsAndRuns) {
  std::atomic<int> executed = 0;
  const auto wanted = description(counting_study(2, executed));
  EXPECT_EQ(wanted.at("study"), "counting");
  EXPECT_EQ(wanted.at("settings").at("n"), 2);
  EXPECT_EQ(wanted.at("runs").at("1").at("i"), 1);
  auto study = counting_study(2, executed);
  study.runs[0].description = nullptr;
  EXPECT_EQ(description(study).at("runs").size(), 1U);
}

}  // namespace
}  // namespace efla::experiments
