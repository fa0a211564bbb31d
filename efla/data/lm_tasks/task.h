// The tasks of table 1 of EFLA (arXiv 2512.12602), read from local files, with the prompts and answers of EleutherAI's
// lm-evaluation-harness. docs/evaluation.md describes the files, the prompts and the differences.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace efla::data {

// An answer, scored by log p(continuation | context).
struct Choice {
  std::string context, continuation;
  std::int64_t characters = 0;  // Unicode code points of the answer, without the space before it
};

// Correct if the gold choice has the greatest score.
struct MultipleChoice {
  std::vector<Choice> choices;
  std::size_t gold = 0;
};

// Correct if the continuation is what greedy decoding returns.
struct Cloze {
  std::string context, continuation;
};

// A text scored as a whole. Words and bytes are counted before detokenization.
struct Document {
  std::string text;
  std::int64_t words = 0, bytes = 0;
  std::int64_t unknown_words = 0;  // number of words that the file gives as <unk>
};

using LmExamples = std::variant<std::vector<MultipleChoice>, std::vector<Cloze>, std::vector<Document>>;

struct LmTask {
  std::string name;
  std::string file;  // path of the file that was read
  LmExamples examples;
};

// A task: its name in --tasks and its metrics in table 1 (word_perplexity, perplexity, acc or acc_norm).
struct LmTaskInfo {
  std::string_view name;
  std::vector<std::string_view> table_metrics;
  bool normalized = false;  // whether the harness reports acc_norm as well
};

// Returns all tasks in the order of table 1.
const std::vector<LmTaskInfo>& lm_tasks();

// Returns the task of that name. Throws Error for an unknown name.
const LmTaskInfo& lm_task_info(std::string_view name);

// Reads the task's file in the folder, plain or packed (.gz, .xz, .zst), and returns its first `limit` examples; all of
// them if limit is 0. Throws Error for an unknown name and IoError: missing, with the names that were tried; content,
// with the line and the field, for anything that contradicts docs/evaluation.md.
LmTask load_lm_task(std::string_view name, const std::filesystem::path& folder, std::int64_t limit = 0);

}  // namespace efla::data
