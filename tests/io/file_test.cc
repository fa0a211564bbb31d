#include "efla/io/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace {
int folder_fsync_error = 0;  // what fsync of a folder fails with
}

// Takes the place of libc's.
extern "C" int fsync(int fd) {
  struct ::stat status {};
  if (folder_fsync_error != 0 && ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) {
    errno = folder_fsync_error;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace efla::io {
namespace {

using test::expect_bad_content;
using test::expect_error;
using test::expect_io_error;
using test::read_text;
using test::TempFolder;
using test::write_text;

// Files of this process may not grow beyond the limit: to a writer the same as a full disk, as root too.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

std::string text_of(ByteView bytes) { return {bytes.begin(), bytes.end()}; }

TEST(AtomicFile, FailsWhereItsFolderDoesNotReachTheDisk) {
  const TempFolder folder;
  const auto path = folder / "file", parts = folder / "parts";
  const auto write = [&] { write_file_atomically(path, "text"); };
  for (const int unable : {EINVAL, ENOTSUP}) {  // file systems that cannot do it
    folder_fsync_error = unable;
    EXPECT_NO_THROW(write());
  }
  folder_fsync_error = EIO;
  expect_io_error(write, IoError::Kind::system, -1, folder.path().string() + ": cannot fsync it: Input/output error");
  expect_io_error([&] { AtomicFolder(parts).commit(); }, IoError::Kind::system, -1,
                  "cannot fsync it: Input/output error");
  folder_fsync_error = 0;
  EXPECT_EQ(folder.files(), 1U);  // the file, and no part of the folder
}

TEST(StaleTemporaries, AreThoseOfProcessesThatHaveEnded) {
  const TempFolder folder;
  const pid_t ended = fork();
  if (ended == 0) _exit(0);
  ASSERT_EQ(waitpid(ended, nullptr, 0), ended);
  const auto of = [](pid_t process) { return std::to_string(process); };
  const std::vector<std::string> stale{".a.tmp-" + of(ended) + "-0", ".b.c.tmp-" + of(ended) + "-17",
                                       ".a.tmp-" + of(getpid()) + "-3"};
  const std::vector<std::string> others{".a.tmp-" + of(getppid()) + "-0",
                                        "a.tmp-" + of(ended) + "-0",
                                        ".a.tmp-" + of(ended) + "-",
                                        ".a.tmp-" + of(ended) + "x",
                                        ".tmp-" + of(ended) + "-0",
                                        ".a.tmp--0",
                                        "a"};
  for (const auto& name : stale) write_text(folder / name, "");
  for (const auto& name : others) write_text(folder / name, "");

  remove_stale_temporaries(folder.path(), "b.c");
  EXPECT_FALSE(std::filesystem::exists(folder / stale[1]));
  EXPECT_EQ(folder.files(), stale.size() - 1 + others.size());
  remove_stale_temporaries(folder.path());
  EXPECT_EQ(folder.files(), others.size());
  for (const auto& name : others) EXPECT_TRUE(std::filesystem::exists(folder / name)) << name;
  remove_stale_temporaries(folder / "none");
}

TEST(ReadFile, GivesTheBytes) {
  const TempFolder folder;
  EXPECT_EQ(text_of(read_file(write_text(folder / "a", "some text"))), "some text");
  EXPECT_TRUE(read_file(write_text(folder / "empty", "")).empty());
  EXPECT_EQ(read_file(write_text(folder / "b", "12345"), 5).size(), 5U);
}

TEST(ReadFile, ReadsAFileWithoutASize) {
  // /proc reports a size of 0.
  EXPECT_EQ(text_of(read_file("/proc/self/comm")).substr(0, 4), "test");
}

TEST(ReadFile, EndsWhereADeviceDoesNot) {
  expect_bad_content([] { read_file("/dev/zero"); }, 1 << 28, "more data, expected at most 268435456 bytes");
}

TEST(ReadFile, RefusesWhatItCannotRead) {
  const TempFolder folder;
  const auto path = folder / "none";
  expect_io_error([&] { read_file(path); }, IoError::Kind::missing, -1,
                  path.string() + ": cannot open it: No such file or directory");
  expect_bad_content([&] { read_file(folder.path()); }, -1, "is a folder");
  expect_bad_content([&] { read_file(write_text(folder / "b", "123456"), 5); }, 5, "at most 5 bytes");
  expect_bad_content([&] { read_file("/dev/zero", 100); }, 100, "at most 100 bytes");
}

TEST(MappedFile, GivesTheBytes) {
  const TempFolder folder;
  MappedFile file(write_text(folder / "a", "mapped"));
  EXPECT_EQ(text_of(file.bytes()), "mapped");
  MappedFile other(write_text(folder / "b", "other"));
  const auto* address = file.bytes().data();
  other = std::move(file);
  EXPECT_EQ(text_of(other.bytes()), "mapped");
  EXPECT_EQ(other.bytes().data(), address);
  const MappedFile moved(std::move(other));
  EXPECT_EQ(text_of(moved.bytes()), "mapped");
  EXPECT_TRUE(MappedFile(write_text(folder / "empty", "")).bytes().empty());
}

TEST(MappedFile, RefusesWhatItCannotMap) {
  const TempFolder folder;
  expect_io_error([&] { MappedFile(folder / "none"); }, IoError::Kind::missing, -1, "No such file");
  expect_bad_content([&] { MappedFile{folder.path()}; }, -1, "is a folder");
  expect_bad_content([&] { MappedFile("/dev/null"); }, -1, "not a regular file");
}

TEST(AtomicFile, ShowsNothingBeforeCommit) {
  const TempFolder folder;
  const auto path = write_text(folder / "a", "old");
  {
    AtomicFile file(path);
    file.write("new content");
    EXPECT_EQ(read_text(path), "old");
    file.commit();
  }
  EXPECT_EQ(read_text(path), "new content");
  EXPECT_EQ(folder.files(), 1U);
}

TEST(AtomicFile, LeavesNothingWithoutCommit) {
  const TempFolder folder;
  const auto path = write_text(folder / "a", "old");
  {
    AtomicFile file(path);
    file.write(std::string(1 << 20, 'x'));
    AtomicFile(folder / "b").write("never");
  }
  EXPECT_EQ(read_text(path), "old");
  EXPECT_EQ(folder.files(), 1U);
}

TEST(AtomicFile, KeepsTheOrderOfSmallAndLargeWrites) {
  const TempFolder folder;
  std::string all;
  AtomicFile file(folder / "a");
  for (const std::size_t size : {3, 300'000, 1, 0, 262'144, 262'143, 2, 1'000'000}) {
    const std::string piece(size, static_cast<char>('a' + size % 26));
    file.write(piece);
    all += piece;
  }
  file.commit();
  EXPECT_EQ(read_text(folder / "a"), all);
}

TEST(AtomicFile, FollowsALinkAndKeepsIt) {
  const TempFolder folder;
  write_text(folder / "real", "old");
  std::filesystem::create_symlink("real", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "real"), "new");
}

TEST(AtomicFile, HonoursTheProcessMask) {
  const TempFolder folder;
  const auto before = ::umask(027);
  write_file_atomically(folder / "a", "x");
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(folder / "a").permissions(), std::filesystem::perms(0640));
}

TEST(AtomicFile, RefusesTargetsThatAreNoFiles) {
  const TempFolder folder;
  expect_io_error([] { AtomicFile("/dev/full"); }, IoError::Kind::system, -1, "/dev/full: cannot write it: exists");
  expect_io_error([&] { AtomicFile{folder.path()}; }, IoError::Kind::system, -1, "is not a regular file");
  const auto path = folder / "none" / "a";
  expect_io_error([&] { AtomicFile{path}; }, IoError::Kind::missing, -1,
                  path.string() + ": cannot create a file in its folder: No such file or directory");
}

TEST(AtomicFile, AFullDiskLeavesTheOldContentAndNothingElse) {
  const TempFolder folder;
  const auto path = write_text(folder / "a", "old");
  // Through the buffer and past it; the failure comes at commit or at the write.
  for (const std::size_t size : {10'000, 3'000'000}) {
    const FileSizeLimit limit(5000);
    expect_io_error([&] { write_file_atomically(path, std::string(size, 'x')); }, IoError::Kind::system, -1,
                    path.string() + ": cannot write to it: File too large");
    EXPECT_EQ(read_text(path), "old");
    EXPECT_EQ(folder.files(), 1U);
  }
}

TEST(AtomicFile, HasATemporaryNameThatIsKnown) {
  const TempFolder folder;
  AtomicFile file(folder / "a.tmp-1.json");
  EXPECT_TRUE(is_temporary_name(std::filesystem::directory_iterator(folder.path())->path().filename().string()));
  EXPECT_TRUE(is_temporary_name(".a.tmp-12-0"));
  for (const char* name : {"", "a", "a.tmp-12-0", ".tmp-12-0", ".a.tmp-12", ".a.tmp-12-", ".a.tmp--0", ".a.tmp-12-0b",
                           ".a.tmp-1b-0", ".a.tmp-12-0-0"}) {
    EXPECT_FALSE(is_temporary_name(name)) << name;
  }
}

TEST(AtomicFolder, AppearsWholeOrNotAtAll) {
  const TempFolder folder;
  const auto target = folder / "t";
  {
    AtomicFolder half(target);
    write_text(half.path() / "a", "1");
    EXPECT_FALSE(std::filesystem::exists(target));
  }
  EXPECT_EQ(folder.files(), 0U);
  {
    AtomicFolder whole(target);
    write_text(whole.path() / "a", "2");
    whole.commit();
  }
  EXPECT_EQ(read_text(target / "a"), "2");
  EXPECT_EQ(folder.files(), 1U);
  {
    AtomicFolder taken(target);
    expect_io_error([&] { taken.commit(); }, IoError::Kind::system, -1, "cannot rename it into place");
  }
  EXPECT_EQ(read_text(target / "a"), "2");
  const auto killed = folder / ".t.tmp-999999999", running = folder / ".t.tmp-1", other = folder / ".t.tmp-999999999b";
  for (const auto& left : {killed, running, other}) std::filesystem::create_directory(left);
  { const AtomicFolder cleans(target); }
  EXPECT_FALSE(std::filesystem::exists(killed));
  EXPECT_TRUE(std::filesystem::exists(running) && std::filesystem::exists(other));
  expect_io_error([&] { AtomicFolder nowhere(folder / "none" / "t"); }, IoError::Kind::missing, -1,
                  "cannot create a folder beside it");
}

}  // namespace
}  // namespace efla::io
