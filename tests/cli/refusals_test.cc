// What the program does where the system refuses it something: streams that take nothing, threads, memory, stack.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

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
    EXPECT_TRUE(std::filesystem::exists(folder / run / "checkpoint.safetensors")) << run;
  }
}

TEST(StandardOutput, ThatTakesNoResultIsAFailureAfterTheTraining) {
  const TempFolder folder;
  const auto result = run_line(training(folder.file("run")) + " >/dev/full");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.err.ends_with("efla: standard output: No space left on device\n")) << result.err;
  EXPECT_TRUE(std::filesystem::exists(folder / "run" / "checkpoint.safetensors"));
}
#endif

}  // namespace
}  // namespace efla::test
