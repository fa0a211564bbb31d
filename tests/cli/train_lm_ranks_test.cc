// efla train lm in several processes: the same run, and the end of one process.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/train_lm_run.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;

// The environment of one of two processes on this machine, as torchrun gives it; a shell's assignments.
std::string environment_of_rank(int rank) {
  return "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(meeting_port()) +
         " WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 RANK=" + std::to_string(rank) + " LOCAL_RANK=" + std::to_string(rank) + " ";
}

// Two processes; `after` is shell that may use $rank0 and $rank1 (process ids). The result is that of rank 0; err1 is
// the file for the standard error of rank 1.
ProgramResult run_two(const std::string& line0, const std::string& line1, const std::string& after,
                      const std::string& err1 = "/dev/null") {
  return run_command({"bash", "-c",
                      environment_of_rank(1) + line1 + " >/dev/null 2>'" + err1 + "' & rank1=$!\n" +
                          environment_of_rank(0) + line0 + " & rank0=$!\n" + after});
}

ProgramResult run_two(const std::string& line, const std::string& after) { return run_two(line, line, after); }

// Processes talk through Gloo, whose headers not every LibTorch brings along (process_group_c10d.cc).
bool lacks_gloo(const ProgramResult& result) { return result.err.find("this build has no Gloo") != std::string::npos; }

TEST_F(TrainLm, TwoProcessesTrainAsOneAndGoOnAsOne) {
  ASSERT_EQ(run_program(train("one")).exit_code, 0);
  const auto two =
      run_two(shell_line(train("two", {"training.steps=24"})), "wait $rank1; code=$?; wait $rank0 && exit $code");
  if (lacks_gloo(two)) GTEST_SKIP() << two.err;
  ASSERT_EQ(two.exit_code, 0) << two.err;
  const auto a = timeless_metrics("one"), b = timeless_metrics("two");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].contains("loss")) continue;
    EXPECT_NEAR(a[i]["loss"].get<double>(), b[i]["loss"].get<double>(), 1e-3) << i;
  }
}

TEST_F(TrainLm, AKilledProcessEndsTheOtherWithItsRank) {
  const auto metrics = path("run") + "/metrics.jsonl";
  const auto result = run_two(shell_line(train("run", {"training.steps=100000"})),
                              "while [ ! -s '" + metrics + "' ]; do sleep 0.02; kill -0 $rank0 || exit 99; done\n" +
                                  "kill -KILL $rank1\nSECONDS=0\nwait $rank0\ncode=$?\n" +
                                  "[ $SECONDS -lt 10 ] || exit 98\nexit $code");
  if (lacks_gloo(result)) GTEST_SKIP() << result.err;
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.err.find("rank 1 of 2 does not answer any more"), std::string::npos) << result.err;
}

// Rank 0 has the store in which the ranks look for each other's signs of life.
TEST_F(TrainLm, AProcessThatStandsStillEndsTheOtherWithItsRank) {
  const auto metrics = path("run") + "/metrics.jsonl";
  const auto line = shell_line(train("run", {"training.steps=100000"}));
  const auto result = run_two(line, line,
                              "while [ ! -s '" + metrics + "' ]; do sleep 0.02; kill -0 $rank0 || exit 99; done\n" +
                                  "kill -STOP $rank0; SECONDS=0\n" +
                                  "while kill -0 $rank1 2>/dev/null && [ $SECONDS -lt 60 ]; do sleep 0.1; done\n" +
                                  "waited=$SECONDS; kill -KILL $rank0 $rank1 2>/dev/null; wait $rank1; code=$?\n" +
                                  "[ $waited -le 20 ] || exit 98; exit $code",
                              path("err1"));
  if (lacks_gloo(result)) GTEST_SKIP() << result.err;
  const auto err1 = read_text(path("err1"));
  EXPECT_EQ(result.exit_code, 1) << err1;
  EXPECT_NE(err1.find("rank 0 of 2 does not answer any more"), std::string::npos) << err1;
}

// A rank that trained with another rate, or another number of steps, would be noticed late or never.
TEST_F(TrainLm, ProcessesThatDisagreeEndBeforeTheyBegin) {
  const auto other = [&](const std::string& setting) {
    const auto result =
        run_two("timeout 60 " + shell_line(train("run")), "timeout 60 " + shell_line(train("run", {setting})),
                "wait $rank1; code=$?; wait $rank0; [ $? = $code ] && exit $code", path("err1"));
    return std::pair(result, read_text(path("err1")));
  };
  for (const auto& [setting, message] : std::vector<std::pair<std::string, std::string>>{
           {"training.lr=1e-3", "train lm: training.lr: got 0.001 on rank 1, expected 0.01 as on rank 0"},
           {"training.steps=30", "training.steps: got 30 on rank 1, expected 24 as on rank 0"},
           {"model.hidden_size=64", "model.hidden_size: got 64 on rank 1, expected 32 as on rank 0"},
           {"data.train=" + path("validation"), "data.train: got"}}) {
    const auto [result, err1] = other(setting);
    if (lacks_gloo(result)) GTEST_SKIP() << result.err;
    EXPECT_TRUE(is_user_mistake(result, message));
    EXPECT_EQ(err1, result.err) << "rank 1 says the same";
    EXPECT_FALSE(fs::exists(path("run")));
  }
}

TEST_F(TrainLm, AProcessThatWaitsForTheOthersEndsAtOnceWhenAsked) {
  const auto line = shell_line(train("run"));
  // The signal comes when the process catches SIGTERM, bit 14 of SigCgt, and has had a second to begin to wait.
  const std::string wait =
      "for i in $(seq 300); do grep -qE '^SigCgt:.*[4-7c-f].{3}$' /proc/$rank0/status && break; sleep 0.1; done; "
      "sleep 1; kill -TERM $rank0; SECONDS=0; wait $rank0; code=$?; [ $SECONDS -le 1 ] || exit 98; exit $code";
  const auto alone = [&](const std::string& environment) {
    return run_command({"bash", "-c", environment + " " + line + " & rank0=$!\n" + wait});
  };
  const auto first = alone(environment_of_rank(0));
  if (lacks_gloo(first)) GTEST_SKIP() << first.err;
  EXPECT_EQ(first.exit_code, 130) << first.err;
  EXPECT_NE(first.err.find("waiting for the other ranks"), std::string::npos) << first.err;
  EXPECT_EQ(alone(environment_of_rank(1)).exit_code, 130) << "nobody listens at the address";
  EXPECT_EQ(alone(environment_of_rank(1) + "MASTER_ADDR=does-not-exist.invalid").exit_code, 130);
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace efla::test
