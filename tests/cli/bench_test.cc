// efla bench: JSON lines that hold what they should, mistakes, and the other study. No figure is judged.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "efla/io/json.h"
#include "tests/nn/random_family.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;

std::vector<json> lines_of(const std::string& text) {
  std::vector<json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
  return lines;
}

ProgramResult bench_op(std::vector<std::string> more) {
  std::vector<std::string> arguments{"bench", "op", "--reps", "1", "--heads", "2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

const json* find(const std::vector<json>& lines, const std::string& name) {
  for (const auto& line : lines) {
    if (line.at("case") == name) return &line;
  }
  return nullptr;
}

TEST(BenchOp, JsonHasEveryContenderOfACaseWithErrorAndShareOfPeak) {
  const auto result = bench_op({"--json", "--filter", "float32/d64/forward/", "--tokens", "80"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = lines_of(result.out);
  for (const char* name : {"chunk", "recurrent", "eager"}) {
    const json* line = find(lines, std::string("float32/d64/forward/") + name);
    ASSERT_NE(line, nullptr) << result.out;
    EXPECT_GT(line->at("us_per_token_head").at("median"), 0);
    EXPECT_GT(line->at("share_of_matrix_peak"), 0);
    EXPECT_GT(line->at("times_eager"), 0);
    EXPECT_LE(line->at("relative_rms_error"), 1e-5);
    EXPECT_EQ(line->at("tokens"), 80);
    const auto& environment = line->at("environment");
    EXPECT_EQ(environment.at("command").get<std::string>().find(EFLA_PROGRAM), 0U);
    EXPECT_EQ(environment.at("ggml").is_null(), find(lines, "float32/d64/forward/ggml") == nullptr);
  }
}

TEST(BenchOp, DecodeIsSetAgainstOneCoreStreamingTheState) {
  const auto result = bench_op({"--json", "--filter", "bfloat16/d128/channel/decode/step"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2U) << result.out;  // in cache and not
  for (const auto& line : lines) {
    const double median = line.at("us_per_token_head").at("median"), stream = line.at("stream_us_per_token_head");
    EXPECT_GT(stream, 0);
    EXPECT_NEAR(line.at("times_stream"), median / stream, 1e-9 * median / stream);
  }
}

TEST(BenchOp, FileGetsTheLinesThatArePrinted) {
  const TempFolder folder;
  const auto path = folder.file("op.jsonl");
  const std::vector<std::string> arguments{"--filter", "d64/scalar/forward/chunk", "--tokens", "40", "--out", path};
  const auto table = bench_op(arguments);
  ASSERT_EQ(table.exit_code, 0) << table.err;
  EXPECT_NE(table.out.find("float32/d64/scalar/forward: B = 1, T = 40, H = 2"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("2 cases in "), std::string::npos) << table.out;
  auto with_json = arguments;
  with_json.push_back("--json");
  const auto printed = lines_of(bench_op(with_json).out);
  const auto kept = io::read_json_lines(path);
  ASSERT_EQ(kept.size(), 4U);  // two runs of float32 and bfloat16
  ASSERT_EQ(printed.size(), 2U);
  EXPECT_EQ(kept[2], printed[0]);
  EXPECT_EQ(kept[3], printed[1]);
}

TEST(BenchOp, ScalingDoublesTheTokens) {
  const auto result = bench_op({"--json", "--scaling", "--filter", "d64/forward/chunk", "--heads", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 8U);
  for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i].at("tokens"), 1024 << i);
}

TEST(BenchOp, MistakesNameWhatThereIs) {
  const auto unknown = bench_op({"--filter", "float64"});
  EXPECT_TRUE(is_user_mistake(unknown, "--filter"));
  EXPECT_TRUE(is_user_mistake(unknown, "float32/d64/forward/chunk"));
  for (const char* part : {"bfloat16", "d128", "scalar", "channel", "forward+backward", "decode", "recurrent"}) {
    EXPECT_TRUE(is_user_mistake(unknown, std::string("; ") + part));
  }
  EXPECT_TRUE(is_user_mistake(bench_op({"--scaling", "--filter", "decode"}), "forward+backward"));
  EXPECT_TRUE(is_user_mistake(bench_op({"--scaling", "--tokens", "64"}), "--scaling"));
  const auto no_reps = bench_op({"--reps", "0"});
  EXPECT_TRUE(is_user_mistake(no_reps, "efla: bench op: --reps: "));
  EXPECT_TRUE(is_user_mistake(no_reps, "(see efla bench op --help)"));
  EXPECT_TRUE(
      is_user_mistake(run_program({"bench"}), "expected one of op, attention, stability, generate, serve, model"));
  const TempFolder folder;
  const auto path = folder.file("gpu.jsonl");
  const auto on_gpu = bench_op({"--device", "cuda", "--filter", "no such case", "--out", path});
  EXPECT_EQ(on_gpu.exit_code, 2);
  EXPECT_EQ(run_program({"info"}).out.find("none: ") != std::string::npos, !std::filesystem::exists(path));
}

TEST(BenchAttention, MeasuresTheCasesOfTheFilter) {
  const TempFolder folder;
  const auto path = folder.file("attention.jsonl");
  const auto result =
      run_program({"bench", "attention", "--filter", "bfloat16/d128/prefill/512", "--reps", "1", "--out", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = io::read_json_lines(path);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].at("case"), "bfloat16/d128/prefill/512");
  EXPECT_GT(lines[0].at("gflops").get<double>(), 0.0);
  EXPECT_LT(lines[0].at("relative_rms_error").get<double>(), 1e-5);
  const auto unknown = run_program({"bench", "attention", "--filter", "d64"});
  EXPECT_TRUE(is_user_mistake(unknown, "--filter"));
  EXPECT_TRUE(is_user_mistake(unknown, "float32/d256/decode/100000"));
}

TEST(BenchModel, TrainsAndGeneratesBesideTheEagerForm) {
  const TempFolder folder;
  const auto path = folder.file("model.jsonl");
  const auto result =
      run_program({"bench", "model", "--model", "efla-1m", "--length", "64", "--reps", "1", "--out", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = io::read_json_lines(path);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].at("operation"), "generating");
  EXPECT_EQ(lines[1].at("operation"), "training");
  for (const auto& line : lines) {
    EXPECT_GT(line.at("tokens_per_s"), 0.0);
    EXPECT_GT(line.at("eager_tokens_per_s"), 0.0);
    double sum = 0.0;
    for (const auto& [part, share] : line.at("shares").items()) sum += share.get<double>();
    EXPECT_NEAR(sum, 1.0, 1e-9);
    EXPECT_GT(line.at("shares").at("matrix products"), 0.05);
    EXPECT_GT(line.at("shares").at("delta rule"), 0.001);
    EXPECT_GT(line.at("shares").at("short convolution"), 0.001);
  }
  EXPECT_TRUE(
      is_user_mistake(run_program({"bench", "model", "--model", "efla-2m"}),
                      "efla: bench model: --model: got 'efla-2m', expected pixel-classifier, or one of efla-1m"));
  EXPECT_TRUE(is_user_mistake(run_program({"bench", "model", "--model", "pixel-classifier", "--length", "9"}), "784"));
  EXPECT_TRUE(is_user_mistake(run_program({"bench", "model", "--reps", "0"}), "--reps"));
}

TEST(BenchStability, KeepsEverySweep) {
  const TempFolder folder;
  const auto path = folder.file("stability.jsonl");
  const auto result = run_program({"bench", "stability", "--tokens", "50", "--out", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = io::read_json_lines(path);
  EXPECT_EQ(lines.size(), 74U);
  for (const auto& line : lines) EXPECT_TRUE(line.contains("environment")) << line;
}

TEST(BenchGenerate, AResultForEachContext) {
  const TempFolder folder;
  const auto path = folder.file("generation.jsonl");
  const auto bench = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "generate"});
    return run_program(more);
  };
  const auto result = bench({"--longest", "1100", "--draws", "3", "--out", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto lines = io::read_json_lines(path);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].at("context"), 1024);
  EXPECT_EQ(lines[1].at("context"), 1100);
  EXPECT_EQ(lines[0].at("state_bytes"), lines[1].at("state_bytes"));
  EXPECT_GT(lines[1].at("ms_per_step").at("median").get<double>(), 0.0);
  EXPECT_TRUE(lines[1].contains("environment"));
  EXPECT_TRUE(is_user_mistake(bench({"--preset", "efla-1b"}), "efla: bench generate: --preset: got 'efla-1b'"));
  EXPECT_TRUE(is_user_mistake(bench({"--mixer", "elfa"}), "efla: bench generate: --mixer: got 'elfa'"));
  EXPECT_TRUE(is_user_mistake(run_program({"bench", "serve", "--preset", "efla-1b"}),
                              "efla: bench serve: --preset: got 'efla-1b'"));
  EXPECT_TRUE(is_user_mistake(bench({"--device", "cpu", "--texts", "64"}), "64 on a CPU"));
  EXPECT_TRUE(is_user_mistake(bench({folder.file("none")}), "no such folder"));
  EXPECT_TRUE(is_user_mistake(bench({folder.file("none"), "--mixer", "efla"}), "--mixer excludes MODEL"));
}

TEST(BenchGenerate, TakesTheFolderOfAModel) {
  const TempFolder folder;
  const auto config = nn::random_family_config(false, 3);
  auto ended = config;
  ended["eos_token_id"] = json::array();  // every id ends a text, of which a benchmark knows nothing
  for (std::int64_t id = 0; id < config["vocab_size"]; ++id) ended["eos_token_id"].push_back(id);
  const auto model = folder.path() / "Some-1B";
  std::filesystem::create_directory(model);
  nn::write_family_folder(model, ended, nn::random_family_tensors(config, "model.", 4), false, true);
  const auto path = folder.file("results.jsonl");
  const auto bench = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "bench");
    arguments.insert(arguments.end(), {"--out", path, "--device", "cpu"});
    return run_program(arguments);
  };
  const auto generated = bench({"generate", model.string(), "--longest", "100", "--draws", "3", "--weights", "int8"});
  ASSERT_EQ(generated.exit_code, 0) << generated.err;
  const auto served = bench({"serve", (model / "").string(), "--sessions", "1", "--tokens", "4", "--reps", "1"});
  ASSERT_EQ(served.exit_code, 0) << served.err;
  const auto lines = io::read_json_lines(path);
  ASSERT_EQ(lines.size(), 5U);
  for (const auto& line : lines) EXPECT_EQ(line.at("preset"), "Some-1B");
  EXPECT_EQ(lines[0].at("mixer"), "qwen3_5");
  EXPECT_EQ(lines[0].at("weights"), "int8");
  EXPECT_EQ(lines[0].at("context"), 100);
  EXPECT_GT(lines[1].at("tokens_per_s").at("median").get<double>(), 0.0);
  EXPECT_TRUE(is_user_mistake(bench({"serve", model.string(), "--preset", "efla-1m"}), "--preset excludes MODEL"));
}

}  // namespace
}  // namespace efla::test
