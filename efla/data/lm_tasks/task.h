// The tasks of table 1 of the EFLA paper, read from local files: prompts and answers as EleutherAI's
// lm-evaluation-harness words them. docs/evaluation.md has the files, the prompts and what differs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace efla::data {

// An answer is scored by log p(continuation | context).
struct Choice {
  std::string context, continuation;
  std::int64_t characters = 0;  // Unicode code points of the answer alone, without the space before it
};

// Right where the gold choice has the greatest score.
struct MultipleChoice {
  std::vector<Choice> choices;
  std::size_t gold = 0;
};

// Right where the continuation is what greedy decoding gives.
struct Cloze {
  std::string context, continuation;
};

// A text scored whole. Words and bytes are those of the text before it was made readable.
struct Document {
  std::string text;
  std::int64_t words = 0, bytes = 0;
  std::int64_t unknown_words = 0;  // of these words, the ones that the file gives as <unk>
};

using LmExamples = std::variant<std::vector<MultipleChoice>, std::vector<Cloze>, std::vector<Document>>;

struct LmTask {
  std::string name;
  std::string file;  // that was read
  LmExamples examples;
};

// A name of --tasks and what table 1 gives of it: word_perplexity, perplexity, acc or acc_norm.
struct LmTaskInfo {
  std::string_view name;
  std::vector<std::string_view> table_metrics;
  bool normalized = false;  // whether the harness has acc_norm of it too
};

// In the order of table 1.
const std::vector<LmTaskInfo>& lm_tasks();

// Throws Error for a name that is not there.
const LmTaskInfo& lm_task_info(std::string_view name);

// Reads the task's file in the folder, plain or packed (.gz, .xz, .zst), and of it the first `limit` examples; all
// where limit is 0. Throws Error for a name that is not there; IoError: missing with the names looked for, content with
// the line and the field for anything that is not as docs/evaluation.md says.
LmTask load_lm_task(std::string_view name, const std::filesystem::path& folder, std::int64_t limit = 0);

}  // namespace efla::data
