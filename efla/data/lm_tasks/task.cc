#include "efla/data/lm_tasks/task.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "efla/base/error.h"
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"
#include "efla/io/content_error.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

// Returns the number of examples that a limit leaves of `all`.
std::size_t limited(std::size_t all, std::int64_t limit) {
  return limit == 0 ? all : std::min(all, static_cast<std::size_t>(limit));
}

template <typename Example>
LmTask read_records(const fs::path& path, std::int64_t limit,
                    const std::function<Example(const io::Fields&, std::size_t index)>& example) {
  const auto text = read_task_file(path);
  const auto lines = split_lines(text, path.string());
  std::vector<Example> examples;
  for (std::size_t i = 0; i < limited(lines.size(), limit); ++i) {
    const auto value = parse_line(path.string(), lines[i]);
    examples.push_back(
        example(io::Fields(value, io::refuse_in_file(path.string(), fmt::format("line {}: ", lines[i].number))), i));
  }
  return {"", path.string(), std::move(examples)};
}

// Reads a task that consists of one file.
template <auto kReader>
LmTask read_task(const fs::path& folder, const char* file, std::int64_t limit) {
  using Example = decltype(kReader(std::declval<const io::Fields&>()));
  return read_records<Example>(find_task_file(folder, {file}), limit,
                               [](const io::Fields& record, std::size_t) { return kReader(record); });
}

LmTask read_piqa(const fs::path& folder, const char* file, std::int64_t limit) {
  const auto path = find_task_file(folder, {file});
  const auto labels_path = find_task_file(folder, {"piqa-valid-labels.lst"}).string();
  const auto labels_text = read_task_file(labels_path);
  const auto labels = split_lines(labels_text, labels_path);
  auto task = read_records<MultipleChoice>(path, limit, [&](const io::Fields& record, std::size_t i) {
    if (i >= labels.size()) {
      io::fail_at_line(labels_path, labels.back().number + 1, "is missing: there are more questions than labels");
    }
    const auto& [number, label] = labels[i];
    if (label != "0" && label != "1") {
      io::fail_at_line(labels_path, number, fmt::format("is '{}', expected 0 or 1", label));
    }
    return piqa_example(record, label == "1");
  });
  const auto questions = std::get<std::vector<MultipleChoice>>(task.examples).size();
  if (limit == 0 && labels.size() > questions) {
    io::fail_at_line(labels_path, labels[questions].number, "there are more labels than questions");
  }
  return task;
}

LmTask read_wikitext(const fs::path& folder, const char* file, std::int64_t limit) {
  const auto path = find_task_file(folder, {"wikitext-2.test.raw", file});
  const auto text = read_task_file(path);
  auto documents = wikitext_documents(text);
  if (documents.empty()) io::fail_in(path, "is empty");
  documents.resize(limited(documents.size(), limit));
  return {"", path.string(), std::move(documents)};
}

struct TaskRow {
  LmTaskInfo info;
  const char* file;
  LmTask (*read)(const fs::path& folder, const char* file, std::int64_t limit);
};

const std::vector<TaskRow>& rows() {
  static const std::vector<TaskRow> table{
      {{"wikitext", {"word_perplexity"}}, "wikitext-2.test.tokens", read_wikitext},
      {{"lambada", {"perplexity", "acc"}}, "lambada-openai-test.jsonl", read_task<lambada_example>},
      {{"piqa", {"acc"}, true}, "piqa-valid.jsonl", read_piqa},
      {{"hellaswag", {"acc_norm"}, true}, "hellaswag-val.jsonl", read_task<hellaswag_example>},
      {{"winogrande", {"acc"}}, "winogrande-dev.jsonl", read_task<winogrande_example>},
      {{"arc_easy", {"acc"}, true}, "arc-easy-test.jsonl", read_task<arc_example>},
      {{"arc_challenge", {"acc_norm"}, true}, "arc-challenge-test.jsonl", read_task<arc_example>},
      {{"boolq", {"acc"}}, "boolq-dev.jsonl", read_task<boolq_example>},
      {{"openbookqa", {"acc_norm"}, true}, "openbookqa-test.jsonl", read_task<openbookqa_example>},
      {{"sciq", {"acc"}, true}, "sciq-test.jsonl", read_task<sciq_example>}};
  return table;
}

const TaskRow& row(std::string_view name) {
  const auto& all = rows();
  const auto found = std::find_if(all.begin(), all.end(), [&](const TaskRow& row) { return row.info.name == name; });
  if (found != all.end()) return *found;
  std::vector<std::string_view> names;
  for (const auto& [info, file, read] : all) names.push_back(info.name);
  throw Error("language model tasks", "task", fmt::format("'{}'", name),
              fmt::format("one of {}", fmt::join(names, ", ")));
}

}  // namespace

const std::vector<LmTaskInfo>& lm_tasks() {
  static const auto all = [] {
    std::vector<LmTaskInfo> infos;
    for (const auto& row : rows()) infos.push_back(row.info);
    return infos;
  }();
  return all;
}

const LmTaskInfo& lm_task_info(std::string_view name) { return row(name).info; }

LmTask load_lm_task(std::string_view name, const fs::path& folder, std::int64_t limit) {
  const auto& [info, file, read] = row(name);
  auto task = read(folder, file, limit);
  task.name = name;
  return task;
}

MultipleChoice choose_answer(const std::string& context, const std::vector<std::string>& answers, std::size_t gold) {
  MultipleChoice example;
  example.gold = gold;
  for (const auto& answer : answers) example.choices.push_back({context, " " + answer, count_characters(answer)});
  return example;
}

}  // namespace efla::data
