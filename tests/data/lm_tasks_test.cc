#include "efla/data/lm_tasks/task.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/io/sha256.h"
#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/python_shuffle.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using nlohmann::json;
using test::expect_bad_content;
using test::expect_error;
using test::expect_io_error;
using test::TempFolder;
using test::write_text;

const std::filesystem::path kSmall = std::filesystem::path(EFLA_SOURCE_DIR) / "tests/support/lm_tasks";

// [context, continuation] of every request, or [text] of every document.
json requests_of(const LmTask& task) {
  auto requests = json::array();
  if (const auto* questions = std::get_if<std::vector<MultipleChoice>>(&task.examples)) {
    for (const auto& question : *questions) {
      for (const auto& choice : question.choices) requests.push_back({choice.context, choice.continuation});
    }
  } else if (const auto* clozes = std::get_if<std::vector<Cloze>>(&task.examples)) {
    for (const auto& cloze : *clozes) requests.push_back({cloze.context, cloze.continuation});
  } else {
    for (const auto& document : std::get<std::vector<Document>>(task.examples)) {
      requests.push_back(json::array({document.text}));
    }
  }
  return requests;
}

const std::vector<MultipleChoice>& questions_of(const LmTask& task) {
  return std::get<std::vector<MultipleChoice>>(task.examples);
}

TEST(LmTasks, HaveTheColumnsOfTableOne) {
  std::vector<std::string> columns;
  for (const auto& task : lm_tasks()) {
    for (const auto metric : task.table_metrics) columns.push_back(std::string(task.name) + " " + std::string(metric));
  }
  EXPECT_EQ(columns,
            (std::vector<std::string>{"wikitext word_perplexity", "lambada perplexity", "lambada acc", "piqa acc",
                                      "hellaswag acc_norm", "winogrande acc", "arc_easy acc", "arc_challenge acc_norm",
                                      "boolq acc", "openbookqa acc_norm", "sciq acc"}));
  expect_error([] { load_lm_task("pica", kSmall); }, "task", "got 'pica', expected one of wikitext, lambada, piqa,");
}

// harness.json holds what lm_eval 0.4.13 asks of these files: make_harness_golden.py beside them.
TEST(LmTasks, AskWhatTheHarnessAsks) {
  const auto golden = io::read_json(kSmall / "harness.json").at("requests");
  ASSERT_EQ(golden.size(), lm_tasks().size());
  for (const auto& info : lm_tasks()) {
    EXPECT_EQ(requests_of(load_lm_task(info.name, kSmall)), golden.at(std::string(info.name))) << info.name;
  }
}

TEST(LmTasks, KnowTheRightAnswersAndTheirLengths) {
  const std::map<std::string, std::vector<std::size_t>> golds{
      {"piqa", {0, 1, 0}},       {"hellaswag", {0, 0, 0, 0}}, {"winogrande", {0, 1, 1}}, {"arc_easy", {0, 2, 0}},
      {"arc_challenge", {0, 1}}, {"boolq", {1, 0}},           {"openbookqa", {1, 0}},    {"sciq", {3, 3, 3}}};
  for (const auto& [name, gold] : golds) {
    const auto task = load_lm_task(name, kSmall);
    std::vector<std::size_t> found;
    for (const auto& question : questions_of(task)) found.push_back(question.gold);
    EXPECT_EQ(found, gold) << name;
  }
  const auto arc = load_lm_task("arc_easy", kSmall);
  EXPECT_EQ(questions_of(arc)[2].choices[0].characters, 4);  // "0 °C": the degree sign is two bytes and one character
  const auto hellaswag = load_lm_task("hellaswag", kSmall);
  EXPECT_EQ(questions_of(hellaswag)[2].choices[0].characters, 24);  // with the space that "[substeps]" leaves
}

TEST(LmTasks, ReadTheFirstOnesWhereLimited) {
  EXPECT_EQ(questions_of(load_lm_task("piqa", kSmall, 2)).size(), 2U);
  EXPECT_EQ(requests_of(load_lm_task("wikitext", kSmall, 1)).size(), 1U);
  EXPECT_EQ(requests_of(load_lm_task("lambada", kSmall, 100)).size(), 5U);
}

TEST(LmTasks, ReadPackedFilesAndNameWhatTheyLookedFor) {
  const TempFolder folder;
  expect_io_error([&] { load_lm_task("lambada", folder.path()); }, IoError::Kind::missing, -1,
                  "holds no lambada-openai-test.jsonl, nor one with .gz, .xz or .zst");
  expect_io_error([&] { load_lm_task("lambada", folder / "none"); }, IoError::Kind::missing, -1, "no such folder");
  write_text(folder / "lambada-openai-test.jsonl.gz", test::gzip(R"({"text": "a b"})"));
  const auto task = load_lm_task("lambada", folder.path());
  EXPECT_EQ(task.file, folder.file("lambada-openai-test.jsonl.gz"));
  EXPECT_EQ(requests_of(task), json::parse(R"([["a", " b"]])"));
  write_text(folder / "wikitext-2.test.tokens", " = A = \n a <unk> <unk> \n");
  EXPECT_EQ(std::get<std::vector<Document>>(load_lm_task("wikitext", folder.path()).examples)[0].unknown_words, 2);
  write_text(folder / "wikitext-2.test.raw", " = A = \n a b c \n");
  EXPECT_EQ(std::get<std::vector<Document>>(load_lm_task("wikitext", folder.path()).examples)[0].unknown_words, 0);
}

// As `efla data tokenize` and `efla generate` do.
TEST(LmTasks, TakeTheLinesOfOtherSystemsAndBlankLines) {
  const TempFolder folder;
  for (const auto& entry : std::filesystem::directory_iterator(kSmall)) {
    if (!entry.is_regular_file()) continue;
    std::string text = "\xef\xbb\xbf";
    for (const char c : test::read_text(entry.path())) text += c == '\n' ? std::string("\r\n") : std::string(1, c);
    write_text(folder / entry.path().filename().string(), text + " \r\n\n");
  }
  for (const auto& info : lm_tasks()) {
    if (info.name == "wikitext") continue;  // its blank lines are its text
    EXPECT_EQ(requests_of(load_lm_task(info.name, folder.path())), requests_of(load_lm_task(info.name, kSmall)));
  }
  const auto words = [](const std::filesystem::path& place) {
    return std::get<std::vector<Document>>(load_lm_task("wikitext", place).examples)[0].text;
  };
  EXPECT_EQ(words(folder.path()), words(kSmall));
}

TEST(LmTasks, ReadLabelsThatAreTexts) {
  const TempFolder folder;
  auto lines = io::read_json_lines(kSmall / "hellaswag-val.jsonl");
  std::string text;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    lines[i]["label"] = std::to_string(i % 4);
    text += lines[i].dump() + "\n";
  }
  write_text(folder / "hellaswag-val.jsonl", text);
  const auto task = load_lm_task("hellaswag", folder.path());
  for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(questions_of(task)[i].gold, i % 4);
}

TEST(LmTasks, NameTheLineAndTheFieldThatIsWrong) {
  const std::map<std::string, std::string> files{
      {"lambada", "lambada-openai-test.jsonl"}, {"piqa", "piqa-valid.jsonl"},
      {"hellaswag", "hellaswag-val.jsonl"},     {"winogrande", "winogrande-dev.jsonl"},
      {"arc_easy", "arc-easy-test.jsonl"},      {"boolq", "boolq-dev.jsonl"},
      {"openbookqa", "openbookqa-test.jsonl"},  {"sciq", "sciq-test.jsonl"}};
  struct Mistake {
    std::string task, pointer;  // of the field that is changed in the file's second line
    json value;                 // null: taken out
    std::string says;
  };
  const std::vector<Mistake> mistakes{
      {"lambada", "/text", "word", "line 2: text: got \"word\", expected a text with a word after a space at its end"},
      {"lambada", "/text", "a word ", "line 2: text: got \"a word \", expected a text with a word"},
      {"lambada", "/text", 5, "line 2: text: got 5, expected a text"},
      {"piqa", "/sol2", nullptr, "line 2: sol2: got nothing, expected a text"},
      {"piqa", "/sol1", "", "line 2: sol1: got \"\", expected a text that is not empty"},
      {"hellaswag", "/endings", json({"a", "b", "c"}), "line 2: endings: got [\"a\",\"b\",\"c\"], expected 4 texts"},
      {"hellaswag", "/endings", json({"a", "", "c", "d"}),
       "line 2: endings: got [\"a\",\"\",\"c\",\"d\"], expected a text that is not empty at [1]"},
      {"hellaswag", "/endings", json({"a", "[title]", "c", "d"}),
       "line 2: endings: got [\"a\",\"[title]\",\"c\",\"d\"], expected texts with more than marks"},
      {"hellaswag", "/endings", "a", "line 2: endings: got \"a\", expected a list of texts"},
      {"hellaswag", "/label", 4, "line 2: label: got 4, expected a whole number from 0 to 3"},
      {"hellaswag", "/label", "4", "line 2: label: got \"4\", expected one of 0, 1, 2, 3"},
      {"hellaswag", "/ctx", nullptr, "line 2: ctx: got nothing, expected a text"},
      {"winogrande", "/sentence", "No blank.", "line 2: sentence: got \"No blank.\", expected a text with a blank '_'"},
      {"winogrande", "/sentence", "It was _ ",
       "line 2: sentence: got \"It was _ \", expected a text after the blank '_'"},
      {"winogrande", "/answer", "3", "line 2: answer: got \"3\", expected one of 1, 2"},
      {"winogrande", "/answer", "", "line 2: answer: got \"\", expected a text that is not empty"},
      {"arc_easy", "/answerKey", "D", "line 2: answerKey: got \"D\", expected one of 1, 2, 3"},
      {"arc_easy", "/choices/label", json({"A"}), "line 2: choices.label: got [\"A\"], expected 3 texts"},
      {"arc_easy", "/choices/text", json::array(), "line 2: choices.text: got [], expected a list that is not empty"},
      {"arc_easy", "/choices", nullptr, "line 2: choices: got nothing, expected an object"},
      {"arc_easy", "/choices", "x", "line 2: choices: got \"x\", expected an object"},
      {"boolq", "/answer", "yes", "line 2: answer: got \"yes\", expected true or false"},
      {"boolq", "/title", nullptr, "line 2: title: got nothing, expected a text"},
      {"openbookqa", "/answerKey", "E", "line 2: answerKey: got \"E\", expected one of A, B, C, D"},
      {"openbookqa", "/question/stem", nullptr, "line 2: question.stem: got nothing"},
      {"openbookqa", "/question/choices/1/text", nullptr, "line 2: question.choices[1].text: got nothing"},
      {"openbookqa", "/question/choices/1", 1, "line 2: question.choices[1]: got 1, expected an object"},
      {"openbookqa", "/question/choices", json::array(),
       "line 2: question.choices: got [], expected a list that is not empty"},
      {"sciq", "/correct_answer", nullptr, "line 2: correct_answer: got nothing"},
      {"sciq", "/support", nullptr, "line 2: support: got nothing"},
  };
  for (const auto& mistake : mistakes) {
    const TempFolder folder;
    std::filesystem::copy_file(kSmall / "piqa-valid-labels.lst", folder / "piqa-valid-labels.lst");
    const auto& file = files.at(mistake.task);
    auto lines = io::read_json_lines(kSmall / file);
    const json::json_pointer pointer(mistake.pointer);
    if (mistake.value.is_null()) {
      lines[1][pointer.parent_pointer()].erase(pointer.back());
    } else {
      lines[1][pointer] = mistake.value;
    }
    write_text(folder / file, lines[0].dump() + "\n" + lines[1].dump());
    SCOPED_TRACE(mistake.task + mistake.pointer);
    expect_bad_content([&] { load_lm_task(mistake.task, folder.path(), 2); }, -1,
                       folder.file(file) + ": " + mistake.says);
  }
}

TEST(LmTasks, FindFilesThatAreBrokenOrDoNotBelongTogether) {
  const TempFolder folder;
  const auto lambada = [&](std::string_view text) {
    write_text(folder / "lambada-openai-test.jsonl", text);
    load_lm_task("lambada", folder.path());
  };
  expect_bad_content([&] { lambada(""); }, -1, "is empty");
  expect_bad_content([&] { lambada(" \n\r\n"); }, -1, "is empty");
  expect_bad_content([&] { lambada("{\"text\": \"a b\"}\n{\"text\": "); }, -1,
                     "line 2: not JSON, from byte 9 of the line on; expected one object per line");
  expect_bad_content([&] { lambada("{\"text\": \"a b\"}\r\n\r\n{\"text\": "); }, -1, "line 3: not JSON, from byte 9");
  expect_bad_content([&] { lambada("[1]"); }, -1, "line 1: got [1], expected an object");
  expect_bad_content([&] { lambada("{\"text\": \"\xff\"}"); }, -1, "line 1: not JSON");
  const auto piqa = [&](std::string_view labels) {
    std::filesystem::copy_file(kSmall / "piqa-valid.jsonl", folder / "piqa-valid.jsonl",
                               std::filesystem::copy_options::overwrite_existing);
    write_text(folder / "piqa-valid-labels.lst", labels);
    load_lm_task("piqa", folder.path());
  };
  expect_bad_content([&] { piqa("0\n2\n1\n"); }, -1, "piqa-valid-labels.lst: line 2: is '2', expected 0 or 1");
  expect_bad_content([&] { piqa("0\n1\n"); }, -1, "line 3: is missing: there are more questions than labels");
  expect_bad_content([&] { piqa("0\n1\n0\n1\n"); }, -1, "line 4: there are more labels than questions");
  write_text(folder / "wikitext-2.test.tokens", "");
  expect_bad_content([&] { load_lm_task("wikitext", folder.path()); }, -1, "is empty");
}

TEST(WikiText, IsCutAtTitlesAndCountedAsItWas) {
  const std::string text = " \n = A = \n \n One two . \n = = B = = \n = C =\n\nThree  four\n";
  const auto documents = wikitext_documents(text);
  ASSERT_EQ(documents.size(), 2U);
  EXPECT_EQ(documents[0].text, " = A =\n\nOne two.\n== B == ");
  // Python: len(re.split(r"\s+", " = A = \n \n One two . \n = = B = = "))
  EXPECT_EQ(documents[0].words, 13);
  EXPECT_EQ(documents[0].bytes, 33);
  EXPECT_EQ(documents[1].text, " = C =\n\nThree  four\n");
  EXPECT_EQ(documents[1].words, 7);
  EXPECT_EQ(wikitext_documents("no title\n").size(), 1U);
  EXPECT_TRUE(wikitext_documents("").empty());
}

TEST(Text, IsStrippedCountedAndCapitalizedAsPythonDoes) {
  EXPECT_EQ(strip(" \t\u00a0\u2003a b\u3000\x1c\n"), "a b");
  EXPECT_EQ(rstrip("a\u200b "), "a\u200b");  // a zero-width space is no white space
  EXPECT_EQ(lstrip(" \n"), "");
  EXPECT_EQ(count_words(""), 1);
  EXPECT_EQ(count_words("a b"), 2);
  EXPECT_EQ(count_words(" a \n\u00a0b "), 4);
  EXPECT_EQ(count_characters("h\u00e9\u20ac\U0001f600"), 4);
  EXPECT_EQ(capitalize("the Man in NAVY"), "The man in navy");
  EXPECT_EQ(capitalize("\u00e9Ab"), "\u00e9ab");
  EXPECT_EQ(capitalize(""), "");
  EXPECT_EQ(replace_all("aaaa", "aaa", "b"), "ba");
}

// json.dumps of Python, of a list of lists of strings.
std::string python_json(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::string text = "[";
  for (const auto& [first, second] : pairs) {
    text += (text.size() > 1 ? ", " : "") + std::string("[") + json(first).dump(-1, ' ', true) + ", " +
            json(second).dump(-1, ' ', true) + "]";
  }
  return text + "]";
}

// The harness's repository holds, in tests/testdata/TASK-vN-loglikelihood, the SHA-256 of all requests that a task made
// of the original data set in 2021, the examples shuffled by Python's generator with seed 42. Prompts are the same now,
// but for SciQ's, which are not compared; HellaSwag's files here are not the original ones.
TEST(LmTasks, OfTheRealFilesAreThoseThatTheHarnessRecorded) {
  const std::filesystem::path folder = EFLA_SHARED_DATA;
  if (!std::filesystem::exists(folder / "piqa-valid.jsonl.gz")) GTEST_SKIP() << "no files of tasks in " << folder;
  const std::map<std::string, std::string> recorded{
      {"lambada", "6829e6a8aa5922e6c92dd31403cc060f242dc0ede4a775e085a70da095ab2e20"},
      {"piqa", "6048a3a2bb3ad1e6a3d98139618e06b4d7de766edd685bd38837596199c3f69f"},
      {"winogrande", "90a3eff49de9173964d46f5ed57bcf9a78a72dd1bfe0e5323b25cebb40b49ea9"},
      {"arc_easy", "ffa6e39a35a16299dcb015f17f986aaa598ad8b4840c4cebe0339a7042232741"},
      {"arc_challenge", "41c34c96cca8ace661911d0033d630c554b283f5a3953bcdc50720ae6b00a9c1"},
      {"boolq", "6577e0d88572772ef08e64f624c0e3df0953286ae1f118ccef15623b59ffeabf"},
      {"openbookqa", "78a49a0ca1a47373adb33463b1d092e6bc0d8f4b01bcb380ada48065037849d7"}};
  for (const auto& [name, digest] : recorded) {
    const auto task = load_lm_task(name, folder);
    std::vector<std::pair<std::string, std::string>> pairs;
    if (name == "lambada") {
      const auto& clozes = std::get<std::vector<Cloze>>(task.examples);
      for (const auto i : test::python_shuffled(clozes.size(), 42)) {
        pairs.insert(pairs.end(), 2, {clozes[i].context, clozes[i].continuation});  // one for each metric
      }
    } else {
      const auto& questions = questions_of(task);
      for (const auto i : test::python_shuffled(questions.size(), 42)) {
        const auto start = static_cast<std::ptrdiff_t>(pairs.size());
        for (const auto& choice : questions[i].choices) pairs.emplace_back(choice.context, choice.continuation);
        if (name == "boolq") std::reverse(pairs.begin() + start, pairs.end());  // yes came first
      }
    }
    EXPECT_EQ(io::sha256(io::as_bytes(python_json(pairs))), digest) << name;
  }
}

TEST(LmTasks, OfTheRealFilesAreAllThere) {
  const std::filesystem::path folder = EFLA_SHARED_DATA;
  if (!std::filesystem::exists(folder / "piqa-valid.jsonl.gz")) GTEST_SKIP() << "no files of tasks in " << folder;
  const std::map<std::string, std::size_t> requests{{"wikitext", 62}, {"hellaswag", 4 * 10'042}, {"sciq", 4'000}};
  for (const auto& [name, count] : requests) EXPECT_EQ(requests_of(load_lm_task(name, folder)).size(), count) << name;
  const auto wikitext = load_lm_task("wikitext", folder);
  std::int64_t words = 0, unknown = 0;
  for (const auto& document : std::get<std::vector<Document>>(wikitext.examples)) {
    words += document.words;
    unknown += document.unknown_words;
  }
  EXPECT_EQ(words, 241'335);
  EXPECT_EQ(unknown, 15'218);
}

}  // namespace
}  // namespace efla::data
