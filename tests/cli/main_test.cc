// The command line itself: help, version, mistakes, exit codes, and a standard output that cannot be written.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "tests/support/program.h"
#include "tests/support/temp_folder.h"

namespace efla::test {
namespace {

TEST(Main, HelpNamesEverySubcommand) {
  const auto result = run_program({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  for (const char* name : {"info", "apply", "data", "--version", "Usage: efla"}) {
    EXPECT_NE(result.out.find(name), std::string::npos) << name << " is missing from\n" << result.out;
  }
}

TEST(Main, HelpOfASubcommandNamesTheProgram) {
  const auto result = run_program({"info", "--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("Usage: efla info"), std::string::npos) << result.out;
}

TEST(Main, VersionIsOneLine) {
  const auto result = run_program({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.out.starts_with("efla ")) << result.out;
  EXPECT_EQ(result.out.find('\n'), result.out.size() - 1) << result.out;
}

TEST(Main, OtherWordsThanTheChoicesAreMistakes) {
  EXPECT_TRUE(is_user_mistake(run_program({"data", "show", "mqar", "--split", "x"}),
                              "data show mqar: --split: got x, expected train, test"));
}

TEST(Main, MistakesNameTheNearest) {
  EXPECT_TRUE(is_user_mistake(run_program({}), "no command given"));
  EXPECT_TRUE(is_user_mistake(run_program({"inof"}), "unknown command 'inof', nearest is info"));
  EXPECT_TRUE(is_user_mistake(run_program({"info", "--jsn"}), "info: unknown option '--jsn', nearest is --json"));
  EXPECT_TRUE(is_user_mistake(run_program({"info", "--jsn=3"}), "info: unknown option '--jsn', nearest is --json"));
  EXPECT_TRUE(is_user_mistake(run_program({"--verison"}), "unknown option '--verison', nearest is --version"));
  EXPECT_TRUE(
      is_user_mistake(run_program({"apply", "in", "extra", "--out", "o"}), "apply: unexpected argument 'extra'"));
  EXPECT_TRUE(is_user_mistake(run_program({""}), "unknown command ''"));
}

// An unset shell variable gives such a text.
TEST(Main, EmptyTextsAreMistakes) {
  const std::string message = ": got an empty text, expected one that is not empty";
  EXPECT_TRUE(is_user_mistake(run_program({"data", "mnist", "--out", ""}), "data mnist: --out" + message));
  EXPECT_TRUE(is_user_mistake(run_program({"apply", "", "--out", "o"}), "apply: IN" + message));
#ifdef EFLA_TORCH
  EXPECT_TRUE(is_user_mistake(run_program({"serve", "x", "--api-keys", ""}), "serve: --api-keys" + message));
  EXPECT_TRUE(is_user_mistake(run_program({"generate", "x", "--save-session", ""}), "--save-session" + message));
  EXPECT_TRUE(is_user_mistake(run_program({"report", ""}), "report: RUN" + message));
#endif
}

// CLI11 would take the nearest number that 64 bits can hold.
TEST(Main, WholeNumbersBeyond64BitsAreMistakes) {
  const std::string beyond = "99999999999999999999";
  const auto refused = [&](std::vector<std::string> arguments, const std::string& number) {
    arguments.push_back(number);
    EXPECT_TRUE(is_user_mistake(run_program(arguments), *(arguments.end() - 2) + ": got " + number +
                                                            ", expected a whole number between -2^63 and 2^63"));
  };
  const std::vector<std::string> tokenize{"data",  "tokenize", "x", "--tokenizer",
                                          "bytes", "--out",    "y", "--shard-tokens"};
  refused(tokenize, beyond);
  refused(tokenize, "-" + beyond);
  for (const auto& seed : {beyond, std::string("9223372036854775808"), std::string("-1")}) {
    EXPECT_TRUE(is_user_mistake(run_program({"data", "show", "mqar", "--seed", seed}),
                                "--seed: got " + seed + ", expected 0 to 9223372036854775807"));
  }
  EXPECT_EQ(run_program({"data", "show", "mqar", "--seed", "9223372036854775807"}).exit_code, 0);
#ifdef EFLA_TORCH
  refused({"generate", "x", "--max-tokens"}, beyond);
  refused({"train", "smnist", "--epochs"}, beyond);
#endif
  // Numbers that are not whole and texts keep theirs.
  EXPECT_TRUE(
      is_user_mistake(run_program({"apply", beyond, "--out", "y", "--scale", beyond}), beyond + ": cannot open"));
}

#ifdef EFLA_TORCH
// A copy of the program without the one beside it that has LibTorch.
TEST(Main, ProgramByItselfAppliesOperatorsAndNamesWhatIsMissing) {
  const TempFolder folder;
  const auto alone = folder.path() / "bin" / "efla";
  std::filesystem::create_directory(alone.parent_path());
  std::filesystem::copy_file(EFLA_PROGRAM, alone);
  EXPECT_EQ(run_command({alone.string(), "apply", "--help"}).exit_code, 0);
  const auto result = run_command({alone.string(), "info"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "efla: cannot run " + (folder.path() / "libexec/efla/efla-torch").string() +
                            ", a part of this program: No such file or directory\n");
}
#endif

TEST(Main, FullDiskUnderStandardOutputIsAFailure) {
  const auto result = run_program({"info"}, "/dev/full");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "efla: standard output: No space left on device\n");
}

TEST(Main, ClosedPipeIsQuiet) {
  const std::string program = EFLA_PROGRAM;
  // The shell's own exit code is the program's: ended by SIGPIPE, or failed where the caller ignores that signal.
  auto result = run_command({"bash", "-c", "set -o pipefail; (sleep 0.2; " + program + " info) | true"});
  EXPECT_EQ(result.exit_code, 128 + SIGPIPE);
  EXPECT_EQ(result.err, "");
  result = run_command({"bash", "-c", "trap '' PIPE; set -o pipefail; (sleep 0.2; " + program + " info) | true"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "");
}

TEST(Main, ClosedStandardStreamsAreQuiet) {
  const auto result = run_command({"bash", "-c", std::string(EFLA_PROGRAM) + " info <&- >&-"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
}

}  // namespace
}  // namespace efla::test
