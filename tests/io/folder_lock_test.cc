#include "efla/io/folder_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_error;
using test::expect_io_error;
using test::read_text;
using test::TempFolder;
using test::write_text;

// A process that locks a folder, says so, and waits for its end.
class Holder {
 public:
  explicit Holder(const TempFolder& folder) {
    int said[2];
    if (::pipe(said) != 0) throw std::runtime_error("no pipe");
    process_ = ::fork();
    if (process_ == 0) {
      const FolderLock lock(folder.path(), "train", "--out");
      (void)!::write(said[1], "x", 1);
      for (;;) ::pause();
    }
    char byte = 0;
    ::close(said[1]);
    if (::read(said[0], &byte, 1) != 1) throw std::runtime_error("the folder was not locked");
    ::close(said[0]);
  }
  ~Holder() { kill(); }

  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  pid_t process() const { return process_; }

 private:
  pid_t process_ = 0;
};

TEST(FolderLock, RefusesASecondProcessWithTheFirstOnesNumber) {
  const TempFolder folder;
  const Holder holder(folder);
  const auto file = folder / FolderLock::kFile;
  const auto content = read_text(file);
  expect_error([&] { FolderLock(folder.path(), "train lm", "--resume"); }, "--resume",
               "train lm: --resume: got " + folder.path().string() + ", which process " +
                   std::to_string(holder.process()) + " is writing, expected a folder that no other process writes");
  EXPECT_EQ(read_text(file), content);
  EXPECT_TRUE(content.starts_with(std::to_string(holder.process()) + " "));
}

TEST(FolderLock, OfAKilledProcessDoesNotCount) {
  const TempFolder folder;
  Holder holder(folder);
  holder.kill();
  ASSERT_TRUE(std::filesystem::exists(folder / FolderLock::kFile));
  {
    const FolderLock lock(folder.path(), "train", "--out");
    EXPECT_TRUE(read_text(folder / FolderLock::kFile).starts_with(std::to_string(::getpid()) + " "));
  }
  EXPECT_EQ(folder.files(), 0U);
}

TEST(FolderLock, OfAMachineElsewhereSaysWhich) {
  const TempFolder folder;
  const Holder holder(folder);
  write_text(folder / FolderLock::kFile,
             "7 far\x1b"
             "away\n");
  expect_error([&] { FolderLock(folder.path(), "train", "--out"); }, "--out", "which process 7 on far?away is writing");
  write_text(folder / FolderLock::kFile, "");  // the holder has not written it yet
  expect_error([&] { FolderLock(folder.path(), "train", "--out"); }, "--out", "which another process is writing");
}

TEST(FolderLock, EndsWithTheObjectAndMoves) {
  const TempFolder folder;
  {
    FolderLock first(folder.path(), "train", "--out");
    const FolderLock second(std::move(first));
    expect_error([&] { FolderLock(folder.path(), "train", "--out"); }, "--out",
                 "process " + std::to_string(::getpid()) + " is");
  }
  EXPECT_EQ(folder.files(), 0U);
  const FolderLock again(folder.path(), "train", "--out");
}

// A program that the holder starts may outlive it: the lock must not.
TEST(FolderLock, IsNotInheritedByAProgramThatIsStarted) {
  const TempFolder folder;
  pid_t program = 0;
  {
    const FolderLock lock(folder.path(), "train", "--out");
    program = ::fork();
    if (program == 0) {
      ::execlp("sleep", "sleep", "100", nullptr);
      ::_exit(1);
    }
    const auto name = "/proc/" + std::to_string(program) + "/comm";
    while (read_text(name) != "sleep\n") std::this_thread::yield();
  }
  const FolderLock lock(folder.path(), "train", "--out");
  ::kill(program, SIGKILL);
  ::waitpid(program, nullptr, 0);
}

// The file is removed and made anew all the time: never may two hold the folder.
TEST(FolderLock, IsHeldByOneAtATime) {
  const TempFolder folder;
  std::atomic<int> inside = 0, most = 0;
  const auto contend = [&] {
    for (int held = 0; held < 50;) {
      try {
        const FolderLock lock(folder.path(), "train", "--out");
        most = std::max(most.load(), ++inside);
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        ++held;
        --inside;
      } catch (const Error&) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(contend);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
  EXPECT_EQ(folder.files(), 0U);
}

TEST(FolderLock, RefusesWhatItCannotLock) {
  const TempFolder folder;
  expect_io_error([&] { FolderLock(folder / "none", "train", "--out"); }, IoError::Kind::missing, -1,
                  ".efla-lock: cannot open it for writing: No such file");
  const auto precious = write_text(folder / "precious", "bytes");
  std::filesystem::create_symlink(precious, folder / FolderLock::kFile);
  expect_io_error([&] { FolderLock(folder.path(), "train", "--out"); }, IoError::Kind::system, -1,
                  ".efla-lock: cannot open it for writing");
  EXPECT_EQ(read_text(precious), "bytes");
}

TEST(PrepareOutputFolder, MakesItOrTakesAnEmptyOne) {
  const TempFolder folder;
  const auto path = folder / "x" / "y";
  std::filesystem::create_directories(path);
  { const auto lock = prepare_output_folder(path, "train"); }
  EXPECT_TRUE(std::filesystem::is_empty(path));
  const auto lock = prepare_output_folder(path, "train");
  expect_error([&] { (void)prepare_output_folder(path, "train"); }, "out", "which process ");
  write_text(path / "run.json", "{}");
  expect_error([&] { (void)prepare_output_folder(path, "train"); }, "out", "which process ");
}

TEST(PrepareOutputFolder, RemovesFoldersThatItMadeAndThatStayEmpty) {
  const TempFolder folder;
  const auto outer = folder / "x", inner = outer / "y";
  { const auto lock = prepare_output_folder(inner / "", "train"); }
  EXPECT_EQ(folder.files(), 0U);
  {
    const auto lock = prepare_output_folder(inner, "train");
    write_text(outer / "mine", "x");
  }
  EXPECT_FALSE(std::filesystem::exists(inner));
  EXPECT_TRUE(std::filesystem::exists(outer / "mine"));
  {
    const auto lock = prepare_output_folder(inner, "train");
    write_text(inner / "result", "x");
  }
  EXPECT_TRUE(std::filesystem::exists(inner / "result"));
}

TEST(PrepareOutputFolder, TakesWhatAKilledProcessLeft) {
  const TempFolder folder;
  write_text(folder / FolderLock::kFile, "1 here\n");
  write_text(folder / ".run.json.tmp-12-0", "{");
  { const auto lock = prepare_output_folder(folder.path(), "train"); }
  write_text(folder / "mark", "");
  write_text(folder / "more", "");
  { const auto lock = prepare_output_folder(folder.path(), "train", "mark"); }
  expect_error([&] { (void)prepare_output_folder(folder.path(), "train"); }, "out", "which is not empty");
  expect_error([&] { (void)prepare_output_folder(folder.path(), "train", "other"); }, "out", "which is not empty");
}

TEST(RemoveStaleLock, RemovesOneThatNobodyHolds) {
  const TempFolder folder;
  remove_stale_lock(folder.path());
  write_text(folder / FolderLock::kFile, "1 here\n");
  remove_stale_lock(folder.path());
  EXPECT_EQ(folder.files(), 0U);
  const FolderLock lock(folder.path(), "train", "--out");
  remove_stale_lock(folder.path());
  EXPECT_EQ(folder.files(), 1U);
}

TEST(PrepareOutputFolder, RefusesWhatIsInUse) {
  const TempFolder folder;
  write_text(folder / "file", "x");
  const auto prepare = [](const std::filesystem::path& path) { (void)prepare_output_folder(path, "train"); };
  expect_error([&] { prepare(folder.path()); }, "out",
               "train: out: got " + folder.path().string() + ", which is not empty, expected a new or empty folder");
  expect_error([&] { prepare(folder / "file"); }, "out", "which is not a folder");
  expect_error([&] { prepare(""); }, "out", "an empty name");
  expect_io_error([&] { prepare(folder / "file" / "x"); }, IoError::Kind::missing, -1,
                  "cannot make the folder: Not a directory");
  EXPECT_EQ(folder.files(), 1U);
  write_text(folder / FolderLock::kFile, "1 here\n");
  expect_error([&] { prepare(folder.path()); }, "out", "which is not empty");
}

}  // namespace
}  // namespace efla::io
