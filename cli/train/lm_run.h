// A training run of a language model as the command line describes it: configuration, data, model.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "efla/data/lm_tasks/task.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/eval/likelihood.h"
#include "efla/io/fields.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/nn/models/language_model.h"
#include "efla/train/tasks/lm_task.h"
#include "experiments/table1/study.h"

namespace efla::cli {

// The command, in messages.
inline constexpr const char* kTrainLm = "train lm";

// Returns CONFIG.toml with each "table.key=value", read as TOML, put over it; a word or a path needs no quotes. Throws
// IoError, and Error for a setting without "=".
nlohmann::json read_configuration(const std::string& path, const std::vector<std::string>& settings);

// Returns the configuration in the run.json of a resumed run with the settings put over it, which may name the places
// of its data alone. Throws IoError, and Error for any other setting.
nlohmann::json resumed_configuration(const std::filesystem::path& run_file, const std::vector<std::string>& settings);

// What a configuration names, read and checked against each other.
class LmSetup {
 public:
  // config: {"model", "data", "training"} as a user writes it, or as full() returned it. Throws Error, IoError, and for
  // fields of the configuration. Where a resumed run's data has moved, the Error says how to name its place.
  explicit LmSetup(const io::Fields& config, bool resumed = false);

  const train::LmOptions& options() const { return options_; }
  double least_parameters() const { return model_config_.least_parameters(); }

  // Returns the configuration with every default filled in.
  nlohmann::json full() const;

  // Returns what run.json keeps of the tokenizer that made the tokens.
  nlohmann::json tokenizer_description() const;

  // Returns what the tokens are: {"train": {tokens, documents, sha256, tokenizer}, "validation": …}.
  nlohmann::json data_description() const;

  // Makes one more copy of the model, for a thread.
  train::LmReplica make_replica();

  std::int64_t parameter_count() const;

  // Returns the scores of the first replica on the tasks: a row of table 1. Throws Error without a tokenizer and
  // Stopped.
  nlohmann::ordered_json score(const std::vector<data::LmTask>& tasks, ThreadPool& pool,
                               const eval::ScoreEvents& events) const;

  // Returns when a run evaluates, samples and saves. It makes no samples where the tokenizer has no token to begin an
  // empty prompt with: new runs are refused then, but a run that began without this check can be resumed.
  train::RunOptions run_options() const;

  // Returns the files of the first replica. This object must outlive the result.
  train::LmFiles files();
  // Returns the tokens of the run. This object must outlive the result.
  train::LmData run_data() const;

 private:
  void read_data(bool resumed);
  // Throws Error for data of which an evaluation or a sample could not be made.
  void check_events(bool resumed) const;
  std::vector<std::int32_t> sample_prompt() const;
  std::string sample() const;
  std::vector<std::pair<std::string, std::string>> tokenizer_files() const;

  train::LmOptions options_;
  nn::LanguageModelConfig model_config_;
  std::unique_ptr<io::TokenFolder> train_, validation_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::vector<std::shared_ptr<nn::LanguageModel>> models_;
};

// Writes the places of the data into the run.json of a resumed run, where they have changed.
void update_places(const std::filesystem::path& folder, const LmSetup& setup);

// Writes the run.json of a new run.
void write_run_file(const std::filesystem::path& folder, const LmSetup& setup, int processes, int threads,
                    const std::string& device);

// Returns what run.json and a study keep of the tokens in a folder: {tokens, documents, sha256, tokenizer}.
nlohmann::json describe_tokens(const io::TokenFolder& folder);

// Returns a function that trains the model of a configuration as one of several runs of a study, by the calling thread,
// and then scores it on the tasks, in the precision of the training.
experiments::TrainLm train_lm_of_study(const std::vector<data::LmTask>& tasks);

}  // namespace efla::cli
