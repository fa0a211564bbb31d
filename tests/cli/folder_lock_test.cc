// Every command that writes a folder, while another process writes it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "efla/io/folder_lock.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

std::map<std::string, std::string> tree_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    files[entry.path().string()] = entry.is_directory() ? "" : read_text(entry.path());
  }
  return files;
}

// The command is refused with this process's number while this process holds the folder, and leaves the folder as it
// is.
void expect_refused(const Arguments& command, const fs::path& folder) {
  SCOPED_TRACE(command[0] + " " + command[1]);
  fs::create_directories(folder);
  const io::FolderLock lock(folder, "test", "folder");
  const auto before = tree_of(folder);
  EXPECT_TRUE(is_user_mistake(run_program(command), folder.string() + ", which process " + std::to_string(::getpid()) +
                                                        " is writing, expected a folder that no other process writes"));
  EXPECT_EQ(tree_of(folder), before);
}

TEST(FolderLockOfCommands, DataTokenizeAndDataMnist) {
  const TempFolder folder;
  const auto text = write_text(folder / "a.txt", "a\n<|endoftext|>\nb\n").string(), out = folder.file("out");
  const auto tokenize = [&](const std::string& to, const std::string& input) {
    return Arguments{"data", "tokenize", input, "--tokenizer", "bytes", "--shard-tokens", "1", "--out", to};
  };
  expect_refused(tokenize(out, text), out);
  // Its second document is unreadable: it ends with a shard, a half-written one of the process killed before it, and
  // more to do.
  const auto broken = write_text(folder / "b.jsonl", "{\"text\": \"a\"}\n{}\n").string(), half = folder.file("half");
  ASSERT_EQ(run_program(tokenize(half, broken)).exit_code, 2);
  write_text(fs::path(half) / ".shard-00001.tokens.tmp-1-0", "half");
  expect_refused(tokenize(half, broken), half);
  expect_refused({"data", "mnist", "--url", "http://127.0.0.1:1/", "--out", folder.file("mnist")}, folder / "mnist");

  // A folder with nothing left to do is not written.
  ASSERT_EQ(run_program(tokenize(out, text)).exit_code, 0);
  EXPECT_FALSE(fs::exists(fs::path(out) / io::FolderLock::kFile));
  const io::FolderLock lock(out, "test", "folder");
  const auto complete = run_program(tokenize(out, text));
  EXPECT_EQ(complete.exit_code, 0) << complete.err;
}

#ifdef EFLA_TORCH
TEST(FolderLockOfCommands, TrainSmnistAndItsStudy) {
  const TempFolder folder;
  const auto run = folder.file("run"), study = folder.file("study");
  const Arguments images{"--train-images", "16", "--test-images", "8", "--epochs", "1", "--batch-size", "8"};
  const auto with_images = [&](Arguments command) {
    command.insert(command.end(), images.begin(), images.end());
    return command;
  };
  const auto train = with_images({"train", "smnist", "--hidden", "16", "--out", run});
  expect_refused(train, run);
  ASSERT_EQ(run_program(train).exit_code, 0);
  EXPECT_FALSE(fs::exists(run + "/" + io::FolderLock::kFile));
  expect_refused({"train", "smnist", "--resume", run}, run);

  const auto reproduce = with_images(
      {"reproduce", "smnist", "--mixers", "linear", "--seeds", "1", "--lr", "1e-3", "--layers", "1", "--out", study});
  expect_refused(reproduce, study);
  ASSERT_EQ(run_program(reproduce).exit_code, 0);
  expect_refused(reproduce, study);
  const auto inner = study + "/runs/linear-layers1-lr0.001-seed1";
  fs::remove(inner + "/result.json");
  expect_refused(reproduce, inner);
  expect_refused({"train", "smnist", "--resume", inner}, inner);
}

TEST(FolderLockOfCommands, SyntheticStudies) {
  const TempFolder folder;
  for (const char* study : {"mad", "mqar", "extrapolation", "state-tracking"}) {
    expect_refused({"reproduce", study, "--scale", "tiny", "--out", folder.file(study)}, folder / study);
  }
}

TEST(FolderLockOfCommands, TrainLmImportAndExport) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "the delta rule learns. ";
  write_text(folder / "text", text);
  const auto tokens = folder.file("tokens"), run = folder.file("run");
  ASSERT_EQ(run_program({"data", "tokenize", folder.file("text"), "--tokenizer", "bytes", "--out", tokens}).exit_code,
            0);
  write_text(
      folder / "config.toml",
      "[model]\nhidden_size = 16\nnum_hidden_layers = 1\nnum_heads = 1\nintermediate_size = 16\n"
      "[data]\ntrain = \"" +
          tokens +
          "\"\n"
          "[training]\nsequence_length = 16\ntokens_per_step = 32\nsteps = 6\nwarmup_steps = 1\ncheckpoint_every = 1\n"
          "keep_checkpoints = 3\n");
  const Arguments train{"train", "lm", folder.file("config.toml"), "--out", run},
      resume{"train", "lm", "--resume", run};
  expect_refused(train, run);
  ASSERT_EQ(run_program(train).exit_code, 0);
  EXPECT_FALSE(fs::exists(run + "/" + io::FolderLock::kFile));
  // To the second process this looks like what a killed one left.
  fs::create_directory(run + "/checkpoints/.step-000007.tmp-1");
  expect_refused(resume, run);

  // The lock of several processes is rank 0's, and rank 1 says why it ends.
  {
    const io::FolderLock lock(run, "test", "folder");
    const auto before = tree_of(run);
    const std::string launch = "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(meeting_port());
    const std::string line = std::string(" ") + EFLA_PROGRAM + " train lm --resume '" + run + "' --threads 1";
    const auto result =
        run_command({"bash", "-c",
                     launch + " RANK=1 LOCAL_RANK=1" + line + " 2>'" + folder.file("rank1") + "' & rank1=$!\n" +
                         launch + " RANK=0 LOCAL_RANK=0" + line + "\ncode=$?\nwait $rank1 && exit 99\nexit $code"});
    if (result.err.find("this build has no Gloo") == std::string::npos) {
      EXPECT_TRUE(is_user_mistake(result, "which process " + std::to_string(::getpid()) + " is writing"));
      EXPECT_NE(read_text(folder / "rank1").find("is writing"), std::string::npos) << read_text(folder / "rank1");
    }
    EXPECT_EQ(tree_of(run), before);
  }
  for (const char* command : {"import", "export"}) {
    expect_refused({command, run, "--out", folder.file(command)}, folder / command);
    EXPECT_EQ(run_program({command, run, "--out", folder.file(command)}).exit_code, 0);
    EXPECT_FALSE(fs::exists(folder / command / io::FolderLock::kFile));
  }
  EXPECT_EQ(run_program(resume).exit_code, 0);
}
#endif

}  // namespace
}  // namespace efla::test
