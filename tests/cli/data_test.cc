// efla data mnist, against a server on this machine.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "efla/data/mnist_download.h"
#include "tests/support/gzip.h"
#include "tests/support/http_server.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using Names = std::vector<std::string>;

const std::string kFirst{data::kMnistFiles[0].name};

class Data : public ::testing::Test {
 protected:
  ProgramResult run() { return run_program({"data", "mnist", "--out", out_, "--url", server_.url("/mnist")}); }

  void serve(std::string_view name, test::Reply reply) { server_.set("/mnist/" + std::string(name), std::move(reply)); }

  // Passes if the program failed, through no fault of the user's, with one line that contains `part`.
  static ::testing::AssertionResult is_failure(const ProgramResult& result, const std::string& part) {
    if (result.exit_code == 1 && result.out.empty() && result.err.starts_with("efla: ") &&
        result.err.find('\n') == result.err.size() - 1 && result.err.find(part) != std::string::npos) {
      return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << "expected exit code 1 and one line with \"" << part << "\", got exit code "
                                         << result.exit_code << "\nstdout: " << result.out
                                         << "\nstderr: " << result.err;
  }

  Names files() const {
    Names names;
    for (const auto& entry : std::filesystem::directory_iterator(out_)) names.push_back(entry.path().filename());
    return names;
  }

  TempFolder folder_;
  std::string out_ = folder_.file("mnist");
  test::HttpServer server_;
};

// With the real files, which lie beside the checkout where it is developed.
class RealData : public Data {
 protected:
  static std::filesystem::path real(std::string_view name) { return std::filesystem::path(EFLA_SHARED_DATA) / name; }

  void SetUp() override {
    if (!std::filesystem::exists(real(kFirst))) GTEST_SKIP() << "no MNIST in " << EFLA_SHARED_DATA;
    for (const auto& file : data::kMnistFiles) serve(file.name, {read_text(real(file.name))});
  }
};

TEST_F(RealData, DownloadsThenFindsItThere) {
  auto result = run();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_NE(result.out.find("train-images-idx3-ubyte.gz: downloaded ("), std::string::npos) << result.out;
  EXPECT_TRUE(result.out.ends_with("MNIST is in " + out_ + ": 4 of 4 files downloaded, all checked\n")) << result.out;
  for (const auto& file : data::kMnistFiles) {
    EXPECT_EQ(read_text(out_ + "/" + std::string(file.name)), read_text(real(file.name)));
  }
  server_.stop();
  result = run();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("train-images-idx3-ubyte.gz: already there ("), std::string::npos) << result.out;
  EXPECT_TRUE(result.out.ends_with("0 of 4 files downloaded, all checked\n")) << result.out;
  EXPECT_EQ(files().size(), 4U);
}

TEST_F(RealData, ContinuesWhereTheConnectionBroke) {
  const auto whole = read_text(real(kFirst));
  serve(kFirst, {.body = whole, .cut = 1'000'000});
  EXPECT_TRUE(is_failure(run(), "the connection broke off"));
  EXPECT_EQ(files(), Names{kFirst + ".part"});
  serve(kFirst, {whole});
  EXPECT_EQ(run().exit_code, 0);
  EXPECT_EQ(server_.requests()[1], "/mnist/" + kFirst + " from 1000000");
  EXPECT_EQ(read_text(out_ + "/" + kFirst), whole);
  EXPECT_EQ(files().size(), 4U);
}

TEST_F(Data, WrongContentIsRemoved) {
  serve(kFirst, {test::gzip("something else")});
  EXPECT_TRUE(is_failure(run(), server_.url("/mnist/" + kFirst) + ": not the expected file, removed: unpacks to 14"));
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(Data, WhatArrivedStaysForTheNextRun) {
  const std::string body(3000, 'x');
  serve(kFirst, {.body = body, .cut = 1000});
  EXPECT_TRUE(is_failure(run(), "run it again to continue"));
  EXPECT_EQ(read_text(out_ + "/" + kFirst + ".part"), body.substr(0, 1000));
  serve(kFirst, {body});
  EXPECT_TRUE(is_failure(run(), "not the expected file, removed"));
  EXPECT_EQ(server_.requests(), (Names{"/mnist/" + kFirst, "/mnist/" + kFirst + " from 1000"}));
  EXPECT_EQ(files(), Names{});
}

TEST_F(Data, NoNetwork) {
  server_.stop();
  EXPECT_TRUE(is_failure(run(), "is there a network connection?"));
  EXPECT_FALSE(std::filesystem::exists(out_)) << "a failure left a folder behind";
}

TEST_F(Data, NoNetworkKeepsAFileThatIsWrong) {
  std::filesystem::create_directory(out_);
  std::ofstream(out_ + "/" + kFirst) << "mine";
  server_.stop();
  EXPECT_TRUE(is_failure(run(), "is there a network connection?"));
  EXPECT_EQ(files(), Names{kFirst});
  EXPECT_EQ(read_text(out_ + "/" + kFirst), "mine");
}

TEST_F(Data, ServerWithoutTheFiles) {
  EXPECT_TRUE(is_failure(run(), server_.url("/mnist/" + kFirst) + ": the server answers with status 404"));
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(Data, Mistakes) {
  EXPECT_TRUE(is_user_mistake(run_program({"data"}), "data: no command given, expected one of mnist"));
  EXPECT_TRUE(is_user_mistake(run_program({"data", "mnits"}), "unknown command 'mnits', nearest is mnist"));
  EXPECT_TRUE(is_user_mistake(run_program({"data", "mnist"}), "data mnist: --out is required"));
  for (const char* url : {"mirror", "file:///etc", "ftp://127.0.0.1/"}) {
    EXPECT_TRUE(is_user_mistake(run_program({"data", "mnist", "--out", out_, "--url", url}),
                                "data mnist: --url: got '" + std::string(url) + "', expected an address"));
  }
  EXPECT_FALSE(std::filesystem::exists(out_));
  std::ofstream(out_) << "a file";
  EXPECT_TRUE(is_user_mistake(run(), "--out: got " + out_ + ", which is not a folder"));
  EXPECT_EQ(read_text(out_), "a file");
}

TEST_F(Data, Help) {
  const auto result = run_program({"data", "mnist", "--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  for (const char* part : {"Usage: efla data mnist", "--out", "--url"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << " is missing from\n" << result.out;
  }
}

}  // namespace
}  // namespace efla::test
