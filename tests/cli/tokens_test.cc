// efla data tokenize and efla data verify.
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/tokens/token_folder.h"
#include "tests/support/gzip.h"
#include "tests/support/pack.h"
#include "tests/support/program.h"
#include "tests/support/sentencepiece.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;

using Contents = std::map<std::string, std::string>;

// Words of a small alphabet, in lines.
std::string random_text(Random& random, std::size_t words) {
  std::string text;
  for (std::size_t i = 0; i < words; ++i) {
    for (std::uint32_t size = 1 + random.below(6); size > 0; --size) text += static_cast<char>('a' + random.below(4));
    text += random.below(12) == 0 ? "\n" : " ";
  }
  return text + "\n";
}

Contents contents_of(const fs::path& folder) {
  Contents contents;
  for (const auto& entry : fs::directory_iterator(folder)) {
    contents[entry.path().filename().string()] = read_text(entry.path());
  }
  return contents;
}

// Passes if the two folders have the same files with the same bytes; names the first that differs.
::testing::AssertionResult same_contents(const Contents& got, const Contents& expected) {
  for (const auto& [name, bytes] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) return ::testing::AssertionFailure() << name << " is missing";
    if (found->second != bytes) return ::testing::AssertionFailure() << name << " differs";
  }
  if (got.size() == expected.size()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got.size() << " files, expected " << expected.size();
}

class Tokens : public ::testing::Test {
 protected:
  Tokens() {
    write_text(model_, sentencepiece_model({"ab", "▁a", "abc", "▁b", "▁c", "▁d", "cd", "▁", "a", "b", "c", "d"}));
  }

  ProgramResult tokenize(const std::vector<std::string>& inputs, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments{"data", "tokenize"};
    arguments.insert(arguments.end(), inputs.begin(), inputs.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    if (std::find(more.begin(), more.end(), "--out") == more.end()) {
      arguments.insert(arguments.end(), {"--out", out_});
    }
    if (std::find(more.begin(), more.end(), "--tokenizer") == more.end()) {
      arguments.insert(arguments.end(), {"--tokenizer", model_});
    }
    return run_program(arguments);
  }

  // The documents in the folder, decoded; each has to end with eos.
  static std::vector<std::string> documents(const std::string& folder, const std::string& tokenizer) {
    const auto decoder = data::load_tokenizer(tokenizer);
    const io::TokenFolder tokens(folder);
    std::vector<std::string> texts;
    for (const auto& shard : tokens.shards()) {
      std::int64_t begin = 0;
      for (std::int64_t d = 0; d < shard.documents(); begin = shard.document_end(d++)) {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(shard.document_end(d) - begin));
        shard.read(begin, std::span(ids));
        EXPECT_EQ(ids.back(), decoder->eos());
        texts.push_back(decoder->decode(ids));
      }
    }
    return texts;
  }

  TempFolder folder_;
  std::string out_ = folder_.file("tokens"), model_ = folder_.file("small.model");
};

TEST_F(Tokens, OfEveryKindOfInputComeInOrder) {
  fs::create_directories(folder_ / "in/more");
  write_text(folder_ / "in/a.txt.gz", gzip("ab cd\n<|endoftext|>\n é 東\n"));
  write_text(folder_ / "in/b.jsonl.zst", zstd("{\"text\": \"abc\"}\n{\"text\": \"d\\nd\"}\n"));
  write_text(folder_ / "in/more/c.xz", xz("x"));
  write_text(folder_ / "last", "end");
  const std::vector<std::string> texts{"ab cd\n", " é 東\n", "abc", "d\nd", "x", "end"};
  for (const auto& tokenizer : {model_, std::string("bytes")}) {
    const auto result = tokenize({folder_.file("in"), folder_.file("last")}, {"--tokenizer", tokenizer});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find(" tokens of 6 documents in 1 shard, tokenizer "), std::string::npos) << result.out;
    EXPECT_EQ(documents(out_, tokenizer), texts);
    const auto verified = run_program({"data", "verify", out_});
    EXPECT_EQ(verified.exit_code, 0);
    EXPECT_NE(verified.out.find("every checksum is right"), std::string::npos) << verified.out;
    fs::remove_all(out_);
  }
}

TEST_F(Tokens, OneDocumentIsNotPlural) {
  write_text(folder_ / "a.txt", "a");
  EXPECT_NE(tokenize({folder_.file("a.txt")}, {}).out.find(" of 1 document in 1 shard, "), std::string::npos);
}

TEST_F(Tokens, FieldSeparatorAndBos) {
  write_text(folder_ / "a.txt", "a\n---\nb\n<|endoftext|>\n");
  write_text(folder_ / "b.ndjson", "{\"body\": \"c\", \"text\": 1}\n");
  const auto result =
      tokenize({folder_.file("a.txt"), folder_.file("b.ndjson")}, {"--separator", "---", "--field", "body", "--bos"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(documents(out_, model_), (std::vector<std::string>{"a\n", "b\n<|endoftext|>\n", "c"}));
  const io::TokenFolder tokens(out_);
  std::vector<std::int64_t> first(1);
  tokens.read(0, first);
  EXPECT_EQ(first[0], 1);
}

TEST_F(Tokens, AreTheSameForAnyNumberOfThreads) {
  Random random(1);
  std::string text;
  for (int d = 0; d < 30; ++d) text += random_text(random, 1 + random.below(30'000)) + "<|endoftext|>\n";
  write_text(folder_ / "in.txt", text);
  Contents one;
  for (const char* threads : {"1", "2", "5"}) {
    const auto result = tokenize({folder_.file("in.txt")}, {"--threads", threads, "--shard-tokens", "100000"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    if (one.empty()) one = contents_of(out_);
    EXPECT_GT(one.size(), 3U);
    EXPECT_TRUE(same_contents(contents_of(out_), one)) << threads;
    fs::remove_all(out_);
  }
}

// Killed at random moments and started again until it ends by itself.
TEST_F(Tokens, SurviveKill9WithTheSameBytes) {
  Random random(2);
  for (const char* name : {"a.txt", "b.txt", "c.txt"}) {
    std::string text;
    for (int d = 0; d < 25; ++d) text += random_text(random, 1 + random.below(8000)) + "<|endoftext|>\n";
    write_text(folder_ / name, text);
  }
  const auto command = [&](const std::string& threads, const std::string& out) {
    std::vector<std::string> words{EFLA_PROGRAM, "data", "tokenize"};
    for (const char* name : {"a.txt", "b.txt", "c.txt"}) words.push_back(folder_.file(name));
    words.insert(words.end(), {"--tokenizer", model_, "--shard-tokens", "30000", "--threads", threads, "--out", out});
    return words;
  };
  const auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(run_command(command("2", folder_.file("whole"))).exit_code, 0);
  const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - start;

  int kills = 0, with_shards = 0;
  for (int run = 0;; ++run) {
    ASSERT_LT(run, 200);
    // Later and later, so that it ends however slow the machine is just now.
    const auto limit = whole * (random.uniform() * (0.3 + 0.1 * run));
    const auto result = run_command_for(command("1", out_), limit);
    if (result == 0) break;
    ASSERT_EQ(result, 128 + SIGKILL);
    ++kills;
    with_shards += fs::exists(out_ + "/index.json");
  }
  EXPECT_TRUE(same_contents(contents_of(out_), contents_of(folder_ / "whole")));
  EXPECT_GT(kills, 0);
  std::printf("killed %d times, %d of them behind the first shard\n", kills, with_shards);
}

// A folder with a shard and no index would be refused as somebody else's after an end between the two.
TEST_F(Tokens, HaveAnIndexBeforeTheFirstShard) {
  write_text(folder_ / "a.txt", "abc\n<|endoftext|>\nbcd\n");
  fs::create_directory(out_);
  const int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  ASSERT_GE(watch, 0);
  ASSERT_GE(inotify_add_watch(watch, out_.c_str(), IN_MOVED_TO), 0);
  ASSERT_EQ(tokenize({folder_.file("a.txt")}, {"--shard-tokens", "1"}).exit_code, 0);
  alignas(inotify_event) std::array<char, 4096> events;
  ASSERT_GT(::read(watch, events.data(), events.size()), 0);
  ::close(watch);
  EXPECT_STREQ(reinterpret_cast<const inotify_event*>(events.data())->name, "index.json");
}

// What a run leaves that ends between the first shard and the index that has it.
TEST_F(Tokens, GoOnFromAShardThatTheIndexDoesNotHave) {
  write_text(folder_ / "a.txt", "abc\n<|endoftext|>\nbcd\n");
  const std::vector<std::string> inputs{folder_.file("a.txt")};
  ASSERT_EQ(tokenize(inputs, {"--shard-tokens", "1"}).exit_code, 0);
  const auto whole = contents_of(out_);
  auto index = io::read_token_index(out_);
  ASSERT_EQ(index.shards.size(), 2U);
  fs::remove(fs::path(out_) / index.shards[1].file);
  index.shards.clear();
  index.unfinished = io::TokenIndex::Position{};
  io::write_token_index(out_, index);
  const auto again = tokenize(inputs, {"--shard-tokens", "1"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_TRUE(same_contents(contents_of(out_), whole));
}

TEST_F(Tokens, GoOnOnlyWithTheSameArguments) {
  write_text(folder_ / "a.txt", "abc\n");
  write_text(folder_ / "b.txt", "abd\n");
  ASSERT_EQ(tokenize({folder_.file("a.txt")}).exit_code, 0);
  const auto before = contents_of(out_);
  const auto again = tokenize({folder_.file("a.txt")}, {"--threads", "1"});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_NE(again.out.find("it was complete already"), std::string::npos) << again.out;
  const auto refused = [&](const ProgramResult& result, const std::string& what) {
    EXPECT_TRUE(is_user_mistake(result, "data tokenize: --out: got " + out_ + ", which was made with another " + what));
  };
  refused(tokenize({folder_.file("b.txt")}), "list of inputs");
  refused(tokenize({folder_.file("a.txt"), folder_.file("b.txt")}), "list of inputs");
  refused(tokenize({folder_.file("a.txt")}, {"--field", "x"}), "field");
  refused(tokenize({folder_.file("a.txt")}, {"--separator", "x"}), "separator");
  refused(tokenize({folder_.file("a.txt")}, {"--shard-tokens", "5"}), "shard_tokens");
  refused(tokenize({folder_.file("a.txt")}, {"--bos"}), "bos");
  refused(tokenize({folder_.file("a.txt")}, {"--tokenizer", "bytes"}), "tokenizer");
  // A change that keeps the size is noticed by its time, which an index of an earlier version does not have.
  fs::last_write_time(folder_ / "a.txt", fs::last_write_time(folder_ / "a.txt") + std::chrono::seconds(1));
  refused(tokenize({folder_.file("a.txt")}), "list of inputs, or their files have changed");
  auto index = io::read_token_index(out_);
  index.source.at("inputs").at(0).erase("changed_ns");
  io::write_token_index(out_, index);
  EXPECT_EQ(tokenize({folder_.file("a.txt")}).exit_code, 0);
  write_text(folder_ / "a.txt", "abcd\n");
  refused(tokenize({folder_.file("a.txt")}), "list of inputs, or their files have changed");
  write_text(fs::path(out_) / "index.json", before.at("index.json"));
  EXPECT_TRUE(same_contents(contents_of(out_), before));
}

TEST_F(Tokens, GoOnFromAnInputWhoseNameIsNotUtf8) {
  const auto input = write_text(folder_ / "a\xff.txt", "ab\n").string();
  EXPECT_EQ(tokenize({input}).exit_code, 0);
  const auto again = tokenize({input});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_NE(again.out.find("it was complete already"), std::string::npos) << again.out;
}

TEST_F(Tokens, BadInputIsNamed) {
  const auto a = write_text(folder_ / "a.txt",
                            "good\nb\xff"
                            "ad")
                     .string();
  EXPECT_TRUE(is_user_mistake(tokenize({a}), a + ": at byte 6: not UTF-8"));
  EXPECT_FALSE(fs::exists(out_)) << "a mistake left a folder behind";
  const auto b = write_text(folder_ / "b.jsonl", "{\"text\": \"a\"}\n{}\n").string();
  EXPECT_TRUE(is_user_mistake(tokenize({b}), b + ": at byte 14: line 2: text: got nothing, expected a text"));
  const auto c = write_text(folder_ / "c.gz", gzip("some text").substr(0, 20)).string();
  EXPECT_TRUE(is_user_mistake(tokenize({c}), c + ": at byte 20: gzip stream is cut short"));
  const auto empty = write_text(folder_ / "empty", "").string();
  EXPECT_TRUE(is_user_mistake(tokenize({empty}), "data tokenize: INPUT: got no text"));
  EXPECT_TRUE(is_user_mistake(tokenize({folder_.file("none")}), "none: there is no such file or folder"));
  EXPECT_TRUE(is_user_mistake(tokenize({empty}, {"--tokenizer", empty}), "not a SentencePiece model"));
  EXPECT_TRUE(is_user_mistake(tokenize({empty}, {"--tokenizer", folder_.file("none")}),
                              "none: cannot open it; a tokenizer is bytes, or the path"));
  EXPECT_TRUE(
      is_user_mistake(tokenize({empty}, {"--shard-tokens", "0"}), "--shard-tokens: got 0, expected at least 1"));
  EXPECT_TRUE(is_user_mistake(tokenize({empty}, {"--separator", ""}), "--separator: got ''"));
  const auto pipe = folder_.file("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(is_user_mistake(tokenize({pipe}), pipe + ": is not a regular file"));
  EXPECT_TRUE(is_user_mistake(tokenize({"/dev/null"}), "/dev/null: is not a regular file"));
  EXPECT_TRUE(is_user_mistake(run_command({"sh", "-c",
                                           std::string("printf text | ") + EFLA_PROGRAM +
                                               " data tokenize /dev/stdin --tokenizer bytes --out " + out_}),
                              "/dev/stdin: is not a regular file"));
  const auto input = folder_.file("texts");
  std::filesystem::create_directory(input);
  write_text(folder_ / "texts/a.txt", "a text");
  EXPECT_TRUE(is_user_mistake(tokenize({input}, {"--out", input + "/tokens"}), "inside the input " + input));
  EXPECT_TRUE(is_user_mistake(tokenize({empty}, {"--out", empty}), "which is not a folder"));
  EXPECT_TRUE(is_user_mistake(tokenize({empty}, {"--out", folder_.path().string()}), "which is not empty"));
  EXPECT_TRUE(is_user_mistake(run_program({"data", "tokenize", "--out", out_, "--tokenizer", "bytes"}),
                              "data tokenize: INPUT is required"));
}

TEST_F(Tokens, VerifyFindsWhatIsWrong) {
  write_text(folder_ / "a.txt", "abc abc\n");
  ASSERT_EQ(tokenize({folder_.file("a.txt")}).exit_code, 0);
  const auto shard = out_ + "/shard-00000.tokens";
  const auto good = read_text(shard);
  auto bad = good;
  bad[io::kTokenShardHeader] ^= 1;
  write_text(shard, bad);
  EXPECT_TRUE(
      is_user_mistake(run_program({"data", "verify", out_}), shard + ": at byte 128: the token shard is corrupt"));
  write_text(shard, good.substr(0, 140));
  EXPECT_TRUE(
      is_user_mistake(run_program({"data", "verify", out_}), shard + ": at byte 140: the token shard is cut short"));
  fs::remove(shard);
  EXPECT_TRUE(is_user_mistake(run_program({"data", "verify", out_}), shard + ": cannot open it"));
  EXPECT_TRUE(is_user_mistake(run_program({"data", "verify", folder_.path().string()}), "index.json: cannot open it"));
}

}  // namespace
}  // namespace efla::test
