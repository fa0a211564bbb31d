// Folders that commands make as a whole.
#include "efla/io/output_folder.h"

#include <gtest/gtest.h>

#include "efla/io/folder_lock.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::io {
namespace {

using test::expect_error;
using test::read_text;
using test::TempFolder;
using test::write_text;

void fill(const std::filesystem::path& path, bool commits) {
  OutputFolder folder(path, "export");
  write_text(folder.path() / "a", "1");
  if (commits) folder.commit();
}

TEST(OutputFolder, IsThereAsAWholeOrNotAtAll) {
  const TempFolder folder;
  const auto inner = folder / "new" / "inner";
  fill(inner, false);
  EXPECT_EQ(folder.files(), 0U);
  fill(inner / "", true);
  EXPECT_EQ(read_text(inner / "a"), "1");
  EXPECT_EQ(folder.files(), 1U);
  expect_error([&] { fill(inner, true); }, "out",
               inner.string() + ", which is not empty, expected a new or empty folder");
  expect_error([&] { fill("", true); }, "out", "an empty name");
  expect_error([&] { fill(inner / "a", true); }, "out", "which is not a folder");
}

TEST(OutputFolder, TakesThePlaceOfAnEmptyFolder) {
  const TempFolder folder;
  const auto empty = folder / "empty", link = folder / "link";
  std::filesystem::create_directory(empty);
  write_text(empty / ".a.tmp-999999999-0", "of a killed process");
  write_text(empty / FolderLock::kFile, "999999999 here");
  std::filesystem::create_directory_symlink(empty, link);
  fill(link, true);
  EXPECT_EQ(read_text(empty / "a"), "1");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(empty), {}), 1);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
}

TEST(OutputFolder, RefusesAFolderThatCannotBeReplaced) {
  const TempFolder folder;
  expect_error(
      [&] {
        const FolderLock lock(folder.path(), "train", "out");
        fill(folder.path(), true);
      },
      "out", "is writing");
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  expect_error([] { fill(".", true); }, "out", "., which is the current folder or a mount point");
  std::filesystem::current_path(before);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace efla::io
