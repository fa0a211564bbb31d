#include "efla/eval/lm_benchmark.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "efla/base/python_random.h"
#include "efla/io/json.h"
#include "tests/support/expect_error.h"
#include "tests/support/python_shuffle.h"

namespace efla::eval {
namespace {

using test::expect_error;

const std::filesystem::path kSmall = std::filesystem::path(EFLA_SOURCE_DIR) / "tests/support/lm_tasks";

// The model of make_harness_golden.py: what a row's state makes of the bytes so far, and the byte of 8 before favoured.
std::vector<TargetScore> toy_scores(const ScoreBatch& batch) {
  constexpr std::int64_t kVocabulary = 258;
  std::vector<TargetScore> scores;
  for (const auto& target : batch.targets) {
    const auto* row = batch.tokens.data() + target.row * batch.length;
    std::int64_t s = 0;
    for (std::int64_t i = 0; i <= target.position; ++i) s = (s * 37 + row[i] + 1) % 1009;
    std::array<double, kVocabulary> logits{};
    double sum = 0.0;
    for (std::int64_t v = 0; v < kVocabulary; ++v) {
      logits[v] = 6.0 * (static_cast<double>((s * 131 + v * v * 17 + s * v * 7 + v) % 1009) / 1009.0);
      if (target.position >= 7 && v == row[target.position - 7]) logits[v] += 7.0;
      sum += std::exp(logits[v]);
    }
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    scores.push_back({logits[target.token] - std::log(sum), best == target.token});
  }
  return scores;
}

// One token a letter, but "ab", which is one; no bos, or 300.
class PairTokenizer : public data::Tokenizer {
 public:
  explicit PairTokenizer(std::int32_t bos, std::int32_t eos) : Tokenizer({"pairs", "", 400, bos, eos}) {}

  std::vector<std::int32_t> encode_part(std::string_view text, bool) const override {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool pair = text.substr(i).starts_with("ab");
      ids.push_back(pair ? 256 : static_cast<unsigned char>(text[i]));
      i += pair;
    }
    return ids;
  }
  std::string_view bytes_of(std::int32_t) const override { return ""; }
  bool begins_with_added_space(std::int32_t) const override { return false; }
  std::size_t last_cut(std::string_view) const override { return 0; }
};

using Ids = std::vector<std::int32_t>;

TEST(ContinuationRequest, TokenizesBothTextsAsOne) {
  const PairTokenizer tokenizer(300, 301);
  const auto request = continuation_request(tokenizer, "xa", "by", {});
  // "xaby" is x, ab, y; the two tokens of "xa" are not scored, though one of them holds a part of the answer.
  EXPECT_EQ(request.tokens, (Ids{'x', 256, 'y'}));
  EXPECT_EQ(request.scored, 1);
}

TEST(ContinuationRequest, MovesWhiteSpaceToTheContinuation) {
  const PairTokenizer tokenizer(300, 301);
  const auto request = continuation_request(tokenizer, "x \n", "y", {});
  EXPECT_EQ(request.tokens, (Ids{'x', ' ', '\n', 'y'}));
  EXPECT_EQ(request.scored, 3);
}

TEST(ContinuationRequest, GivesBosOrEosToATextWithoutContext) {
  EXPECT_EQ(continuation_request(PairTokenizer(300, 301), "", "y", {}).tokens, (Ids{300, 'y'}));
  EXPECT_EQ(continuation_request(PairTokenizer(-1, 301), " ", "y", {}).tokens, (Ids{301, ' ', 'y'}));
  EXPECT_EQ(continuation_request(PairTokenizer('y', 301), "", "yz", {}).tokens, (Ids{'y', 'z'}));
  expect_error([] { continuation_request(PairTokenizer(-1, -1), "", "y", {}); }, "tokenizer", "neither bos nor eos");
}

TEST(ContinuationRequest, BeginsWithBosWhereAsked) {
  const TextOptions options{.bos = true};
  const auto request = continuation_request(PairTokenizer(300, 301), "x", " y", options);
  EXPECT_EQ(request.tokens, (Ids{300, 'x', ' ', 'y'}));
  EXPECT_EQ(request.scored, 2);
  EXPECT_EQ(continuation_request(PairTokenizer(300, 301), "", "y", options).tokens, (Ids{300, 'y'}));
  expect_error([&] { continuation_request(PairTokenizer(-1, 301), "x", "y", options); }, "bos", "without bos");
}

TEST(ContinuationRequest, CutsOffTheStart) {
  const TextOptions options{.max_length = 3};
  const auto request = continuation_request(PairTokenizer(300, 301), "vwxy", "yz", options);
  EXPECT_EQ(request.tokens, (Ids{'x', 'y', 'y', 'z'}));  // three are read, and each but the first is predicted
  EXPECT_EQ(request.scored, 2);
  expect_error([&] { continuation_request(PairTokenizer(300, 301), "x", "wxyz", options); }, "max_length",
               "got 3, expected at least the 4 tokens of an answer");
  expect_error([&] { continuation_request(PairTokenizer(300, 301), "xa", "b", {}); }, "continuation 'b'",
               "no token of its own");
}

TEST(DocumentRequests, ScoreEveryTokenOnceInWindows) {
  const TextOptions options{.max_length = 3};
  const auto requests = document_requests(PairTokenizer(300, 301), "klmnopqr", options);
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].tokens, (Ids{300, 'k', 'l', 'm'}));
  EXPECT_EQ(requests[1].tokens, (Ids{'m', 'n', 'o', 'p'}));
  EXPECT_EQ(requests[2].tokens, (Ids{'o', 'p', 'q', 'r'}));  // filled up with what came before
  EXPECT_EQ(requests[0].scored, 3);
  EXPECT_EQ(requests[1].scored, 3);
  EXPECT_EQ(requests[2].scored, 2);
  const auto one = document_requests(PairTokenizer(-1, 301), "kl", options);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].tokens, (Ids{301, 'k', 'l'}));
  EXPECT_TRUE(document_requests(PairTokenizer(300, 301), "", options).empty());
  expect_error([] { document_requests(PairTokenizer(-1, 301), "kl", {.bos = true}); }, "bos", "without bos");
}

TEST(Score, DoesNotDependOnTheBatches) {
  std::vector<ScoreRequest> requests;
  PythonRandom random(1);
  for (int i = 0; i < 60; ++i) {
    ScoreRequest request;
    const auto size = 2 + random.bits() % 20;
    for (std::uint32_t n = 0; n < size; ++n) request.tokens.push_back(static_cast<std::int32_t>(random.bits() % 4));
    request.scored = 1 + random.bits() % (size - 1);
    requests.push_back(request);
  }
  const auto alone = score(requests, toy_scores, 1);
  for (const std::int64_t batch_tokens : {7, 64, 100'000}) {
    std::int64_t rows = 0;
    const auto scorer = [&](const ScoreBatch& batch) {
      EXPECT_TRUE(batch.rows == 1 || batch.rows * batch.length <= batch_tokens);
      EXPECT_EQ(static_cast<std::int64_t>(batch.tokens.size()), batch.rows * batch.length);
      rows += batch.rows;
      return toy_scores(batch);
    };
    std::int64_t done = 0;
    const auto together = score(requests, scorer, batch_tokens, {{}, [&](std::int64_t n, std::int64_t all) {
                                                                   EXPECT_GT(n, done);
                                                                   EXPECT_EQ(all, 60);
                                                                   done = n;
                                                                 }});
    EXPECT_EQ(done, 60);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_DOUBLE_EQ(together[i].log_likelihood, alone[i].log_likelihood);
      EXPECT_EQ(together[i].greedy, alone[i].greedy);
    }
    EXPECT_LE(rows, 60);
  }
}

TEST(Score, SharesTheRowOfAnswersThatDifferInTheirLastToken) {
  std::int64_t rows = 0;
  const auto scorer = [&](const ScoreBatch& batch) {
    rows += batch.rows;
    return toy_scores(batch);
  };
  const std::vector<ScoreRequest> requests{{{1, 2, 3}, 1}, {{1, 2, 4, 4}, 1}, {{1, 2, 5}, 2}};
  const auto scores = score(requests, scorer, 1000);
  EXPECT_EQ(rows, 2);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_DOUBLE_EQ(scores[i].log_likelihood, score({requests[i]}, toy_scores, 1)[0].log_likelihood);
  }
}

TEST(Score, StopsAndRefusesWhatIsNoProbability) {
  const std::vector<ScoreRequest> requests{{{1, 2}, 1}};
  EXPECT_THROW(score(requests, toy_scores, 8, {[] { return true; }, {}}), Stopped);
  const auto nan = [](const ScoreBatch&) { return std::vector<TargetScore>{{std::nan(""), false}}; };
  EXPECT_THROW(score(requests, nan, 8), std::runtime_error);
}

double score_of(const std::vector<Score>& scores, const std::string& name) {
  const auto found = std::find_if(scores.begin(), scores.end(), [&](const Score& s) { return s.name == name; });
  return found == scores.end() ? std::nan("") : found->value;
}

TEST(BenchmarkMetrics, TakeTheFirstOfEqualChoices) {
  const std::vector<data::MultipleChoice> examples{{{{"", "", 1}, {"", "", 4}}, 0}, {{{"", "", 4}, {"", "", 1}}, 1}};
  const std::vector<Likelihood> likelihoods{{-2.0, false}, {-2.0, false}, {-4.0, false}, {-1.0, false}};
  const auto scores = choice_metrics(examples, likelihoods, true);
  EXPECT_EQ(score_of(scores, "acc"), 1.0);
  EXPECT_EQ(score_of(scores, "acc_norm"), 0.0);  // −2/1 < −2/4; −4/4 = −1/1, of which the first is wrong
  EXPECT_EQ(choice_metrics(examples, likelihoods, false).size(), 1U);
}

// tests/testdata of the harness's repository holds what it made in 2021 of the whole data sets with log-likelihoods
// −random.random() of Python's generator, seed 42, the examples shuffled by it with the same seed.
TEST(BenchmarkMetrics, OfTheRealFilesAreThoseThatTheHarnessRecorded) {
  const std::filesystem::path folder = EFLA_SHARED_DATA;
  if (!std::filesystem::exists(folder / "piqa-valid.jsonl.gz")) GTEST_SKIP() << "no files of tasks in " << folder;
  struct Recorded {
    double acc, acc_stderr, acc_norm, acc_norm_stderr;
  };
  const std::map<std::string, Recorded> recorded{
      {"piqa", {0.514145810663765, 0.011661154475524836, 0.5114254624591947, 0.01166277802645167}},
      {"winogrande", {0.516179952644041, 0.014045126130978606, std::nan(""), std::nan("")}},
      {"arc_easy", {0.2474747474747475, 0.008855114414834707, 0.24074074074074073, 0.008772796145221907}},
      {"arc_challenge", {0.24488054607508533, 0.012566273985131354, 0.2440273037542662, 0.012551447627856257}},
      {"openbookqa", {0.214, 0.018359797502387046, 0.276, 0.020011219298073517}},
  };
  for (const auto& [name, expected] : recorded) {
    const auto task = data::load_lm_task(name, folder);
    const auto& examples = std::get<std::vector<data::MultipleChoice>>(task.examples);
    std::vector<data::MultipleChoice> shuffled;
    for (const auto i : test::python_shuffled(examples.size(), 42)) shuffled.push_back(examples[i]);
    PythonRandom random(42);
    std::vector<Likelihood> likelihoods;
    for (const auto& example : shuffled) {
      for (std::size_t i = 0; i < example.choices.size(); ++i) likelihoods.push_back({-random.uniform(), false});
    }
    const auto scores = choice_metrics(shuffled, likelihoods, true);
    EXPECT_NEAR(scores[0].value, expected.acc, 1e-12) << name;
    EXPECT_NEAR(scores[0].standard_error.value(), expected.acc_stderr, 1e-12) << name;
    if (std::isnan(expected.acc_norm)) continue;
    EXPECT_NEAR(scores[1].value, expected.acc_norm, 1e-12) << name;
    EXPECT_NEAR(scores[1].standard_error.value(), expected.acc_norm_stderr, 1e-12) << name;
  }
}

// The same of LAMBADA, whose two metrics had a request each, with 10 resamples.
TEST(BenchmarkMetrics, BootstrapAsTheHarnessRecorded) {
  PythonRandom random(42);
  std::vector<double> log_likelihoods(5153);
  for (auto& value : log_likelihoods) {
    value = -random.uniform();
    random.uniform();
  }
  ThreadPool pool(2);
  EXPECT_NEAR(bootstrapped_perplexity_error(log_likelihoods, 10, pool), 0.006497321146240192, 1e-13);
  std::vector<Likelihood> likelihoods;
  for (const double value : log_likelihoods) likelihoods.push_back({value, false});
  likelihoods.resize(100);
  const auto scores = cloze_metrics(likelihoods, pool);
  EXPECT_EQ(score_of(scores, "acc"), 0.0);
  // The delta method: perplexity · deviation / √n.
  const double error =
      score_of(scores, "perplexity") * mean_standard_error(std::span(log_likelihoods).first(100)).value();
  EXPECT_NEAR(scores[0].standard_error.value(), error, 0.02 * error);
}

TEST(BenchmarkMetrics, HaveNoErrorOfOneExample) {
  ThreadPool pool(1);
  for (const auto& score : cloze_metrics(std::vector<Likelihood>{{-1.0, true}}, pool)) {
    EXPECT_FALSE(score.standard_error) << score.name;
  }
}

std::vector<LmTaskResult> evaluate_all(const std::filesystem::path& folder, std::int64_t limit,
                                       std::int64_t batch_tokens) {
  const auto tokenizer = data::load_tokenizer("bytes");
  ThreadPool pool(2);
  std::vector<LmTaskResult> results;
  for (const auto& info : data::lm_tasks()) {
    const auto task = data::load_lm_task(info.name, folder, limit);
    const auto requests = lm_task_requests(task, *tokenizer, {.max_length = 64}, pool);
    results.push_back(evaluate_lm_task(task, requests, toy_scores, batch_tokens, pool));
  }
  return results;
}

// Every score and standard error that lm_eval 0.4.13 gives of the files beside harness.json with the toy model.
TEST(LmBenchmark, ScoresAsTheHarness) {
  const auto golden = io::read_json(kSmall / "harness.json").at("results");
  const auto results = evaluate_all(kSmall, 0, 4096);
  const auto found = to_json(results);
  for (const auto& [task, scores] : golden.items()) {
    for (const auto& [name, value] : scores.items()) {
      SCOPED_TRACE(task + " " + name);
      if (value.is_null()) {
        EXPECT_TRUE(found.at(task).at(name).is_null());
      } else {
        const double expected = value.get<double>();
        EXPECT_NEAR(found.at(task).at(name).get<double>(), expected, 1e-9 * std::abs(expected));
      }
    }
  }
  EXPECT_EQ(found.at("lambada").at("examples"), 5);
  EXPECT_EQ(found.at("wikitext").at("unknown_words"), 3);
  double sum = 0.0;
  for (const auto* task : {"lambada", "piqa", "winogrande", "arc_easy", "boolq", "sciq"}) {
    sum += golden.at(task).at("acc").get<double>();
  }
  for (const auto* task : {"hellaswag", "arc_challenge", "openbookqa"}) {
    sum += golden.at(task).at("acc_norm").get<double>();
  }
  EXPECT_NEAR(table_average(results).value(), sum / 9, 1e-12);
  EXPECT_FALSE(table_average(std::span(results).first(9)));
  std::vector<std::string> names;
  const auto row = table_row(results);
  for (const auto& [name, value] : row.items()) names.push_back(name);
  EXPECT_EQ(names, table_columns());
  EXPECT_FALSE(table_row(std::span(results).first(9)).contains("average"));
}

TEST(LmBenchmark, CountsTheTokensOfDocuments) {
  const auto tokenizer = data::load_tokenizer("bytes");
  const data::LmTask task{"wikitext", "", std::vector<data::Document>{{"kl mn", 2, 10, 0}, {"o", 3, 6, 0}}};
  const auto half = [](const ScoreBatch& batch) {
    return std::vector<TargetScore>(batch.targets.size(), {-std::log(2.0), true});
  };
  ThreadPool pool(1);
  const auto result =
      evaluate_lm_task(task, lm_task_requests(task, *tokenizer, {.max_length = 2}, pool), half, 8192, pool);
  EXPECT_EQ(result.examples, 2);
  EXPECT_NEAR(result.score("token_perplexity").value, 2.0, 1e-12);
  EXPECT_NEAR(result.score("bits_per_byte").value, 6.0 / 16.0, 1e-12);
  EXPECT_NEAR(result.score("word_perplexity").value, std::pow(2.0, 6.0 / 5.0), 1e-12);
  EXPECT_THROW(result.score("acc"), std::out_of_range);
}

}  // namespace
}  // namespace efla::eval
