// efla eval lm: a language model on the tasks of table 1 of the paper.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/eval/engine_scorer.h"
#include "cli/support/converted_types.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/output_file.h"
#include "cli/support/progress_bar.h"
#include "cli/support/threads.h"
#include "cli/support/weights.h"
#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/eval/language_model_scorer.h"
#include "efla/eval/lm_benchmark.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/model_size.h"

namespace efla::cli {
namespace {

constexpr const char* kEvalLm = "eval lm";

struct EvalLmArguments {
  std::string model, data = ".", tokenizer, out, device = "auto", weights = "float32";
  std::vector<std::string> tasks;
  eval::LmEvalOptions options;
  std::int64_t limit = 0;
  int threads = 0;
  bool json = false;
};

std::vector<std::string> all_tasks() {
  std::vector<std::string> names;
  for (const auto& info : data::lm_tasks()) names.emplace_back(info.name);
  return names;
}

void check_tasks(const std::vector<std::string>& tasks) {
  const auto known = all_tasks();
  for (const auto& task : tasks) {
    if (std::find(known.begin(), known.end(), task) == known.end()) {
      throw Error(kEvalLm, "--tasks", "'" + task + "'", "a task's name, nearest is " + nearest_name(task, known));
    }
    if (std::count(tasks.begin(), tasks.end(), task) > 1) {
      throw Error(kEvalLm, "--tasks", "'" + task + "' twice", "each task once");
    }
  }
}

// A model of any kind, as the scores and their report need it.
struct ScoredModel {
  eval::Scorer scorer;  // which keeps the model
  std::int64_t parameters = 0;
};

ScoredModel load_scored_model(const EvalLmArguments& arguments, ThreadPool& pool) {
  const auto weights = nn::parse_weight_type(arguments.weights);
  const auto device = choose_model_device(kEvalLm, arguments.device, arguments.model);
  if (nn::is_family_folder(arguments.model)) {
    const auto scored = [&](const auto& model, std::unique_ptr<engine::EngineModel> made) {
      return ScoredModel{make_scorer(std::move(made), arguments.options.text.max_length, pool), model->parameters()};
    };
    if (device.is_cuda()) {
      const auto vocab = nn::load_family_config(arguments.model).vocab_size;
      const auto model = std::make_shared<nn::GpuFamilyModel>(arguments.model, weights, vocab, device);
      return scored(model, engine::make_family_model(model));
    }
    const auto model = std::make_shared<nn::FamilyModel>(arguments.model, weights);
    return scored(model, engine::make_family_model(model, weights));
  }
  auto model = nn::load_language_model(arguments.model, device);
  if (weights != nn::WeightType::float32) nn::round_weights(*model, weights);
  const auto score = [model](const eval::ScoreBatch& batch) { return eval::make_scorer(*model)(batch); };
  return {score, model->parameter_count()};
}

std::unique_ptr<data::Tokenizer> load_tokenizer(const EvalLmArguments& arguments, const nn::ModelSize& model) {
  const auto path = require_tokenizer(kEvalLm, arguments.model, arguments.tokenizer);
  auto tokenizer = data::load_tokenizer(path);
  require_tokenizer_of_run(kEvalLm, arguments.model, path, tokenizer->info());
  if (tokenizer->vocab_size() > model.vocab_size) {
    throw Error(kEvalLm, "--tokenizer",
                fmt::format("{} tokens, of {}", tokenizer->vocab_size(), tokenizer->info().name),
                fmt::format("at most the {} of the model", model.vocab_size));
  }
  return tokenizer;
}

std::vector<eval::LmTaskResult> evaluate(const EvalLmArguments& arguments, const std::vector<data::LmTask>& tasks,
                                         const std::vector<eval::LmTaskRequests>& requests, const eval::Scorer& scorer,
                                         ThreadPool& pool) {
  ProgressBar bar("eval");
  std::vector<eval::LmTaskResult> results;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const auto& task = tasks[i];
    const eval::ScoreEvents events{interrupted, [&](std::int64_t done, std::int64_t all) {
                                     bar.draw(static_cast<double>(done) / static_cast<double>(all),
                                              fmt::format("{} {} of {}", task.name, done, all), done == all);
                                   }};
    results.push_back(eval::evaluate_lm_task(task, requests[i], scorer, arguments.options.batch_tokens, pool, events));
  }
  bar.clear();
  return results;
}

nlohmann::ordered_json report(const EvalLmArguments& arguments, const std::string& kind, std::int64_t parameters,
                              const data::Tokenizer& tokenizer, const std::vector<eval::LmTaskResult>& results) {
  nlohmann::ordered_json all{{"model", nn::language_model_folder(arguments.model).string()},
                             {"mixer", kind},
                             {"parameters", parameters},
                             {"weights", arguments.weights},
                             {"tokenizer", tokenizer.info().name},
                             {"max_length", arguments.options.text.max_length},
                             {"bos", arguments.options.text.bos},
                             {"limit", arguments.limit},
                             {"tasks", eval::to_json(results)}};
  all["table_1"] = eval::table_row(results);
  return all;
}

void print_table(const std::vector<eval::LmTaskResult>& results) {
  fmt::print("{:<14} {:<16} {:>12} {:>10} {:>9}\n", "task", "metric", "value", "stderr", "examples");
  for (const auto& result : results) {
    for (const auto& [name, value, standard_error] : result.scores) {
      fmt::print("{:<14} {:<16} {:>12.6g} {:>10} {:>9}\n", result.task, name, value,
                 standard_error ? fmt::format("{:.4g}", *standard_error) : "-", result.examples);
    }
  }
  if (const auto average = eval::table_average(results)) {
    fmt::print("{:<14} {:<16} {:>12.6g}\n", "average", "of table 1", *average);
  }
  for (const auto& result : results) {
    if (result.unknown_words == 0) continue;
    fmt::print("{}: the text has <unk> for {} words; compare with other models on this file alone\n", result.task,
               result.unknown_words);
  }
}

void eval_lm(const EvalLmArguments& arguments) {
  const auto names = arguments.tasks.empty() ? all_tasks() : arguments.tasks;
  check_tasks(names);
  if (!arguments.out.empty()) check_output_file(kEvalLm, "--out", arguments.out);
  nn::language_model_folder(arguments.model);  // throws for a folder without a model, which is RUN mistyped
  std::vector<data::LmTask> tasks;  // all read before the first is scored, to report a mistake in the last one early
  for (const auto& name : names) tasks.push_back(data::load_lm_task(name, arguments.data, arguments.limit));
  ThreadPool& pool = use_threads(arguments.threads);
  const auto size = nn::model_size(arguments.model);
  const auto tokenizer = load_tokenizer(arguments, size);
  std::vector<eval::LmTaskRequests> requests;  // all made before the first is scored, for a --max-length too small
  for (const auto& task : tasks) {
    requests.push_back(eval::lm_task_requests(task, *tokenizer, arguments.options.text, pool));
  }
  report_ignored_checkpoints(kEvalLm, arguments.model);
  report_converted_types(kEvalLm, arguments.model, nn::parse_weight_type(arguments.weights));
  const auto model = load_scored_model(arguments, pool);

  watch_for_interrupts();
  std::vector<eval::LmTaskResult> results;
  try {
    results = evaluate(arguments, tasks, requests, model.scorer, pool);
  } catch (const Stopped&) {
    end_interrupted("Stopped. Nothing was written.");
  }
  const auto text = io::to_json_text(report(arguments, size.kind, model.parameters, *tokenizer, results));
  if (!arguments.out.empty()) io::write_file_atomically(arguments.out, text);
  if (arguments.json) {
    fmt::print("{}", text);
  } else {
    print_table(results);
  }
}

}  // namespace

void add_eval_lm(CLI::App& eval) {
  auto* command = eval.add_subcommand("lm", "A language model on the tasks of table 1 of the EFLA paper");
  auto arguments = std::make_shared<EvalLmArguments>();
  command->add_option("RUN", arguments->model, "Folder of a run of efla train lm, or of a model")->required();
  command
      ->add_option("--tasks", arguments->tasks,
                   "Tasks, separated by commas (default: all, which are wikitext,lambada,piqa,hellaswag,\n"
                   "winogrande,arc_easy,arc_challenge,boolq,openbookqa,sciq)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->take_all()
      ->type_name("NAMES");
  command->add_option("--data", arguments->data, "Folder of the tasks' files (docs/evaluation.md)")
      ->capture_default_str()
      ->type_name("DIR");
  add_count_option(*command, "--limit", arguments->limit,
                   "Only this many examples of each task, the first ones; 0: all", 0);
  add_count_option(*command, "--batch", arguments->options.batch_tokens,
                   "Tokens of all texts that are computed together", 1, "TOKENS");
  add_count_option(*command, "--max-length", arguments->options.text.max_length,
                   "Most tokens of one text; longer texts lose their start", 1, "TOKENS");
  command->add_option(
      "--tokenizer", arguments->tokenizer,
      "A SentencePiece model, a tokenizer.json, a GGUF file, or bytes\n(default: what the model names)");
  command->add_flag("--bos", arguments->options.text.bos, "Start every text with the bos token");
  command->add_option("--out", arguments->out, "Write the scores to this file, as JSON")->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print the scores as JSON instead of the table");
  add_weights_option(*command, arguments->weights);
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([arguments] { eval_lm(*arguments); });
}

}  // namespace efla::cli
