// efla data show and the studies of synthetic tasks as a user meets them.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/program.h"

namespace efla::test {
namespace {

using Arguments = std::vector<std::string>;

TEST(ShowCommand, PrintsAnExampleWithItsTargetsMarked) {
  const auto result = run_program({"data", "show", "selective-copying", "--length", "12", "--copied", "3"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(
      result.out.starts_with("selective-copying, copied 3, length 12, vocab 16; train example 0, seed 1: 12 "
                             "tokens, 3 targets\ninputs  "))
      << result.out;
  EXPECT_NE(result.out.find("COPY    _    _    _\ntargets    .    ."), std::string::npos) << result.out;
  EXPECT_EQ(run_program({"data", "show", "selective-copying", "--length", "12", "--copied", "3"}).out, result.out);
}

TEST(ShowCommand, HelpSaysWhichParametersAreWholeNumbers) {
  const auto help = run_program({"data", "show", "noisy-recall", "--help"}).out;
  EXPECT_NE(help.find("--vocab INT=32"), std::string::npos) << help;
  EXPECT_NE(help.find("--noise FLOAT=0.2"), std::string::npos) << help;
}

TEST(ShowCommand, MeasuresHowFastExamplesAreDrawn) {
  const auto result = run_program({"data", "show", "mqar", "--count", "100", "--split", "test"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("100 examples in "), std::string::npos) << result.out;
  EXPECT_TRUE(result.out.ends_with(" million tokens/s\n")) << result.out;
}

TEST(ShowCommand, Mistakes) {
  const auto show = [](const Arguments& more) {
    Arguments all{"data", "show"};
    all.insert(all.end(), more.begin(), more.end());
    return run_program(all);
  };
  EXPECT_TRUE(is_user_mistake(show({}), "expected one of in-context-recall"));
  EXPECT_TRUE(is_user_mistake(show({"mqra"}), "nearest is mqar"));
  EXPECT_TRUE(is_user_mistake(show({"mqar", "--length", "64", "--pairs", "17"}),
                              "data show mqar: --pairs: got 68 > 64, expected 4"));
  EXPECT_TRUE(is_user_mistake(show({"stack", "--stacks", "200"}), "stacks"));
  EXPECT_TRUE(is_user_mistake(show({"mqar", "--split", "validation"}), "--split"));
}

#ifdef EFLA_TORCH
using nlohmann::json;

Arguments tiny(const std::string& study, const std::string& out, const std::string& mixers) {
  return {"reproduce", study, "--scale", "tiny", "--mixers", mixers, "--out", out};
}

TEST(SyntheticStudyCommand, WritesResultsAndAReport) {
  const TempFolder folder;
  const auto out = folder.file("study");
  const auto result = run_program(tiny("state-tracking", out, "deltanet-neg,efla"));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("report: " + out + "/report.html"), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("8 of 8: "), std::string::npos) << result.err;
  const auto results = json::parse(read_text(out + "/results.json"));
  EXPECT_EQ(results.at("study"), "state-tracking");
  EXPECT_EQ(results.at("scores").size(), 8U);
  EXPECT_EQ(results.at("runs").size(), 8U);
  EXPECT_EQ(results.at("eigenvalues").size(), 2U);
  EXPECT_EQ(results.at("scores")[0].at("accuracy")[3].at("length"), 128);
  EXPECT_NE(read_text(out + "/report.html").find("State tracking"), std::string::npos);

  const auto again = run_program(tiny("state-tracking", out, "deltanet-neg,efla"));
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(json::parse(read_text(out + "/results.json")).at("scores"), results.at("scores"));
  EXPECT_TRUE(
      is_user_mistake(run_program(tiny("state-tracking", out, "efla")), "reproduce state-tracking: --mixers: got"));
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "state-tracking", "--out", out}),
                              "reproduce state-tracking: --scale: got \"small\", expected \"tiny\" as in "));
  write_text(out + "/runs/s5-efla-lr0.01-wd0.01-seed1/result.json", R"({"task": "s5"})");
  EXPECT_TRUE(is_user_mistake(run_program(tiny("state-tracking", out, "deltanet-neg,efla")),
                              "result.json: setting: got nothing, expected a text"));
}

TEST(SyntheticStudyCommand, CtrlCSavesAndTheSameCommandGoesOn) {
  const TempFolder folder;
  const auto whole = folder.file("whole"), broken = folder.file("broken");
  ASSERT_EQ(run_program(tiny("extrapolation", whole, "kda")).exit_code, 0);
  std::string line = EFLA_PROGRAM;
  for (const auto& word : tiny("extrapolation", broken, "kda")) line += " '" + word + "'";
  const auto stopped = run_command({"sh", "-c",
                                    line + " & efla=$!; while ! cat '" + broken +
                                        "'/runs/*/metrics.jsonl 2>/dev/null | grep -q loss; do sleep 0.02; kill -0 "
                                        "$efla || exit 99; done; kill -INT $efla; wait $efla"});
  ASSERT_EQ(stopped.exit_code, 130) << stopped.err;
  EXPECT_NE(stopped.err.find("The same command continues from here: "), std::string::npos) << stopped.err;
  EXPECT_FALSE(std::filesystem::exists(broken + "/results.json"));
  ASSERT_EQ(run_program(tiny("extrapolation", broken, "kda")).exit_code, 0);
  const auto scores = [](const std::string& out) { return json::parse(read_text(out + "/results.json")).at("scores"); };
  EXPECT_EQ(scores(broken), scores(whole));
}

TEST(SyntheticStudyCommand, TrainsOnAllOfMad) {
  const TempFolder folder;
  const auto result = run_program(tiny("mad", folder.file("study"), "deltanet"));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("selective-copying"), std::string::npos) << result.out;
}

TEST(SyntheticStudyCommand, Mistakes) {
  const TempFolder folder;
  const auto out = folder.file("study");
  EXPECT_TRUE(is_user_mistake(run_program(tiny("mad", out, "elfa")), "nearest: efla"));
  EXPECT_TRUE(
      is_user_mistake(run_program({"reproduce", "mad", "--scale", "huge", "--out", out}), "one of paper, small, tiny"));
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "mad", "--lr", "0", "--out", out}), "lr"));
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "mda", "--out", out}), "nearest is mad"));
  EXPECT_FALSE(std::filesystem::exists(out)) << "a mistake left a folder behind";
}
#endif

}  // namespace
}  // namespace efla::test
