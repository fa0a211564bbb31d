#include <gtest/gtest.h>

#include "efla/data/mnist_download.h"
#include "efla/io/sha256.h"
#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/http_server.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using test::expect_io_error;
using test::HttpServer;
using test::read_text;
using test::Reply;
using test::TempFolder;
using test::write_text;
using Requests = std::vector<std::string>;

constexpr auto kSystem = IoError::Kind::system;

// Two files on a server and a folder to bring them to.
class Download : public testing::Test {
 protected:
  Download() {
    std::uint32_t x = 1;
    for (auto& c : first_) c = static_cast<char>((x = x * 1664525U + 1013904223U) >> 24);
    first_sum_ = io::sha256(io::as_bytes(first_));
    second_sum_ = io::sha256(io::as_bytes(second_));
    server_.set("/d/a.gz", {first_packed_ = test::gzip(first_)});
    server_.set("/d/b.gz", {test::gzip(second_)});
  }

  void run(const io::DownloadLimits& limits = {}) {
    events_.clear();
    const auto record = [&](const DownloadEvent& e) {
      if (e.kind == DownloadEvent::Kind::progress) {
        last_progress_ = e;
      } else {
        events_.push_back(std::string(e.name) + (e.kind == DownloadEvent::Kind::done ? " done" : " there"));
      }
    };
    const std::vector<RemoteFile> files{{"a.gz", static_cast<std::int64_t>(first_.size()), first_sum_},
                                        {"b.gz", static_cast<std::int64_t>(second_.size()), second_sum_}};
    download_files(folder_ / "out", server_.url("/d"), files, record, limits);
  }

  void expect_complete() {
    EXPECT_EQ(read_text(folder_ / "out/a.gz"), first_packed_);
    EXPECT_EQ(read_text(folder_ / "out/b.gz"), test::gzip(second_));
    const std::filesystem::directory_iterator files(folder_ / "out");
    EXPECT_EQ(std::distance(files, {}), 2);
  }

  // Makes the first attempt stop within the first file.
  void run_until_cut(std::size_t cut) {
    server_.set("/d/a.gz", {.body = first_packed_, .cut = cut});
    expect_io_error([&] { run(); }, kSystem, -1, "connection broke off");
    EXPECT_EQ(read_text(folder_ / "out/a.gz.part"), first_packed_.substr(0, cut));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "out/a.gz"));
    server_.set("/d/a.gz", {first_packed_});
  }

  TempFolder folder_;
  HttpServer server_;
  std::string first_ = std::string(300'000, ' '), second_ = "second", first_packed_, first_sum_, second_sum_;
  std::vector<std::string> events_;
  DownloadEvent last_progress_;
};

TEST_F(Download, BringsEveryFileOnce) {
  run();
  expect_complete();
  EXPECT_EQ(events_, (Requests{"a.gz done", "b.gz done"}));
  EXPECT_EQ(server_.requests(), (Requests{"/d/a.gz", "/d/b.gz"}));
  run();
  EXPECT_EQ(events_, (Requests{"a.gz there", "b.gz there"}));
  EXPECT_EQ(server_.requests().size(), 2U);
}

TEST_F(Download, ReplacesAFileThatIsNotTheOneExpected) {
  run();
  write_text(folder_ / "out/b.gz", test::gzip("foreign"));
  run();
  expect_complete();
  EXPECT_EQ(events_, (Requests{"a.gz there", "b.gz done"}));
}

TEST_F(Download, ContinuesWhereItWasCut) {
  run_until_cut(100'000);
  run();
  expect_complete();
  EXPECT_EQ(server_.requests(), (Requests{"/d/a.gz", "/d/a.gz from 100000", "/d/b.gz"}));
}

TEST_F(Download, CountsTheBytesThatWereThere) {
  run_until_cut(100'000);
  server_.set("/d/b.gz", {"", 500});  // the last progress stays that of the first file
  expect_io_error([&] { run(); }, kSystem, -1, "status 500");
  EXPECT_EQ(last_progress_.name, "a.gz");
  EXPECT_EQ(last_progress_.bytes, static_cast<std::int64_t>(first_packed_.size()));
  EXPECT_EQ(last_progress_.total, static_cast<std::int64_t>(first_packed_.size()));
}

TEST_F(Download, BeginsAgainWhereTheServerKnowsNoRanges) {
  run_until_cut(100'000);
  server_.set("/d/a.gz", {.body = first_packed_, .ranges = false});
  run();
  expect_complete();
}

TEST_F(Download, BeginsAgainWhereThePartIsLongerThanTheFile) {
  std::filesystem::create_directory(folder_ / "out");
  write_text(folder_ / "out/a.gz.part", first_packed_ + "more");
  run();
  expect_complete();
  EXPECT_EQ(server_.requests()[1], "/d/a.gz");
}

TEST_F(Download, NeedsNoServerForAWholePart) {
  std::filesystem::create_directory(folder_ / "out");
  write_text(folder_ / "out/a.gz.part", first_packed_);
  run();
  expect_complete();
  EXPECT_EQ(server_.requests(), Requests{"/d/b.gz"});
}

TEST_F(Download, RemovesTheWrongContent) {
  server_.set("/d/a.gz", {test::gzip("something else")});
  expect_io_error([&] { run(); }, kSystem, -1,
                  server_.url("/d/a.gz") + ": not the expected file, removed: unpacks to 14");
  server_.set("/d/a.gz", {"<html>login</html>"});
  expect_io_error([&] { run(); }, kSystem, -1, "incorrect header check");
  server_.set("/d/a.gz", {first_packed_.substr(0, 1000)});
  expect_io_error([&] { run(); }, kSystem, -1, "gzip stream is cut short");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

TEST_F(Download, WillNotTakeMoreThanExpected) {
  server_.set("/d/a.gz", {std::string(400'000, 'x')});
  expect_io_error([&] { run(); }, kSystem, -1, "sends more than the 365536 bytes expected");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

TEST_F(Download, SaysWhatTheServerAnswers) {
  server_.set("/d/a.gz", {"not here", 404});
  expect_io_error([&] { run(); }, kSystem, -1, server_.url("/d/a.gz") + ": the server answers with status 404");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

TEST_F(Download, SaysThatThereIsNoNetwork) {
  server_.stop();
  expect_io_error([&] { run(); }, kSystem, -1, "is there a network connection?");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
  expect_io_error([&] { io::download("http://no-such-host.invalid/x", folder_ / "x"); }, kSystem, -1,
                  "is there a network connection?");
}

TEST_F(Download, GivesUpOnASilentServer) {
  server_.set("/d/a.gz", {.body = first_packed_, .stall_ms = 20'000});
  expect_io_error([&] { run({.stall_seconds = 1}); }, kSystem, -1, "went silent for 1 s");
}

TEST_F(Download, TakesOnlyHttp) {
  write_text(folder_ / "secret", "x");
  expect_io_error([&] { io::download("file://" + (folder_ / "secret").string(), folder_ / "x"); }, kSystem, -1,
                  "not supported");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "x"));
}

TEST_F(Download, SaysThatTheFolderIsAFile) {
  write_text(folder_ / "out", "a file");
  test::expect_error([&] { run(); }, "out", (folder_ / "out").string() + ", which is not a folder");
}

TEST(Mnist, ListsTheFourFilesAsTheyAre) {
  const std::filesystem::path folder = EFLA_SHARED_DATA;
  if (!std::filesystem::exists(folder / kMnistFiles[0].name)) GTEST_SKIP() << "no MNIST in " << folder;
  const TempFolder copy;
  for (const auto& file : kMnistFiles) std::filesystem::copy_file(folder / file.name, copy / file.name);
  int there = 0;
  download_mnist(copy.path(), "http://127.0.0.1:1/",
                 [&](const DownloadEvent& event) { there += event.kind == DownloadEvent::Kind::already_there; });
  EXPECT_EQ(there, 4);
}

}  // namespace
}  // namespace efla::data
