// What the program does where the system refuses it something: streams that take nothing, threads, memory, stack.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/cli/apply_case.h"
#include "tests/support/program.h"
#include "tests/support/temp_folder.h"

namespace efla::test {
namespace {

// Runs a line of the shell in which $EFLA is the program.
ProgramResult run_line(const std::string& line) {
  return run_command({"bash", "-c", std::string("set -o pipefail; EFLA='") + EFLA_PROGRAM + "'; " + line});
}

TEST(StandardError, FullDiskUnderItChangesNoExitCode) {
  const TempFolder folder;
  EXPECT_EQ(run_line("$EFLA apply " + folder.file("nope") + " --out " + folder.file("x") + " 2>/dev/full").exit_code,
            2);
  EXPECT_EQ(run_line("$EFLA info --unknown 2>/dev/full").exit_code, 2);
}

TEST(StandardError, FullDiskUnderBothStreamsKeepsWhatWasComputed) {
  const TempFolder folder;
  const auto text = write_text(folder / "text", "a text\n").string();
  const auto tokenize = "$EFLA data tokenize " + text + " --tokenizer bytes --out " + folder.file("tokens");
  EXPECT_EQ(run_line(tokenize + " 2>/dev/full >/dev/full").exit_code, 1) << "the last line is a result";
  const auto verified = run_program({"data", "verify", folder.file("tokens")});
  EXPECT_EQ(verified.exit_code, 0) << verified.err;
}

#ifdef EFLA_TORCH
std::string training(const std::string& out) {
  return "$EFLA train smnist --train-images 32 --test-images 8 --epochs 1 --hidden 8 --batch-size 8 --threads 1 "
         "--out " +
         out;
}

TEST(StandardError, ThatTakesNothingEndsNoTraining) {
  const TempFolder folder;
  auto result = run_line(training(folder.file("full")) + " 2>/dev/full");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("test accuracy"), std::string::npos) << result.out;
  EXPECT_EQ(run_line(training(folder.file("closed")) + " 2>&1 >/dev/null | true").exit_code, 0);
  for (const char* run : {"full", "closed"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / run / "checkpoints" / "step-000004")) << run;
  }
}

TEST(StandardOutput, ThatTakesNoResultIsAFailureAfterTheTraining) {
  const TempFolder folder;
  const auto result = run_line(training(folder.file("run")) + " >/dev/full");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.err.ends_with("efla: standard output: No space left on device\n")) << result.err;
  EXPECT_TRUE(std::filesystem::exists(folder / "run" / "checkpoints" / "step-000004"));
}
#endif

// A sanitizer takes address space for itself.
#ifndef __SANITIZE_ADDRESS__
TEST(Threads, ThatCannotBeStartedAreAFailure) {
  const TempFolder folder;
  const auto in = folder.file("in");
  write_tensors(in, random_problem(1, 64, 4, 16, 16), io::TensorType::F32);
  const auto result =
      run_line("ulimit -v 400000; exec $EFLA apply " + in + " --out " + folder.file("out") + " --threads 1000");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "efla: cannot start 1000 threads: Resource temporarily unavailable\n");
}

#ifdef EFLA_TORCH
// "seed" and "device" are options of these commands too.
TEST(Fields, NamedLikeAnOptionAreNotTheOption) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "model");
  write_text(folder / "model/config.json", R"({"model_type": "delta_net", "seed": 1.5})");
  const auto generated = run_program({"generate", folder.file("model"), "--prompt", "a"});
  EXPECT_EQ(generated.exit_code, 2);
  EXPECT_NE(generated.err.find("config.json: seed: got 1.5"), std::string::npos) << generated.err;
  write_text(folder / "config.toml", "device = \"cuda\"\n");
  const auto trained = run_program({"train", "lm", folder.file("config.toml"), "--out", folder.file("run")});
  EXPECT_EQ(trained.exit_code, 2);
  EXPECT_NE(trained.err.find("config.toml: device: got"), std::string::npos) << trained.err;
}

TEST(Limits, TooLowForLibTorchAreAFailure) {
  // The least one has room for the program, whose kernels for GPUs take the greater part, and for libraries.
  const auto least = "-v " + std::to_string(std::filesystem::file_size(EFLA_PROGRAM) / 1024 + 90'000);
  for (const std::string& limit : {least, std::string("-v 300000"), std::string("-v 600000"), std::string("-s 128")}) {
    const auto result = run_line("ulimit " + limit + "; exec $EFLA info");
    EXPECT_EQ(result.exit_code, 1) << limit;
    EXPECT_TRUE(result.err.starts_with(limit[1] == 'v' ? "efla: address space: got a limit of "
                                                       : "efla: stack: got a limit of 128 kB (ulimit -s), expected "))
        << result.err;
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  }
}

// Either there is enough memory or a message says that there is not: OpenBLAS would wait for it for ever.
TEST(Limits, OnMemoryLetATrainingEnd) {
  const TempFolder folder;
  int failures = 0, successes = 0;
  for (int megabytes = 700; megabytes <= 1600; megabytes += 100) {
    const auto run = folder.file(std::to_string(megabytes));
    const auto result = run_line("ulimit -v " + std::to_string(megabytes * 1024) +
                                 "; export OPENBLAS_NUM_THREADS=1; timeout -s KILL 60 " + training(run) +
                                 " --threads 2 2>&1 >/dev/null | tail -1");
    ++(result.exit_code == 0 ? successes : failures);
    if (result.exit_code == 0) continue;
    EXPECT_EQ(result.exit_code, 1) << megabytes << " MB";
    EXPECT_TRUE(result.out.starts_with("efla: ")) << megabytes << " MB: " << result.out;
  }
  EXPECT_GT(failures, 0);
  EXPECT_GT(successes, 0);
}
#endif
#endif

}  // namespace
}  // namespace efla::test
