// Table 1 of the EFLA paper: which language models are trained, and the table of their perplexities and accuracies.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "experiments/common/plan.h"
#include "experiments/common/study.h"

namespace efla::experiments {

enum class LmEnd { finished, stopped, diverged };

// How training ended, and where it finished, the model's row of table 1 (eval::table_row) if its tasks are scored.
struct LmOutcome {
  LmEnd end;
  nlohmann::ordered_json table_row = {};
};

// Trains a language model of a configuration {"model", "data", "training"} in an existing folder, from the checkpoint
// there if there is one, and leaves run.json and metrics.jsonl. The folder has a result of `efla train lm`.
using TrainLm = std::function<LmOutcome(const nlohmann::json& config, const std::filesystem::path& folder,
                                        const RunContext& context)>;

// What the models are trained on.
struct LmTokens {
  std::filesystem::path folder;  // with the token folders train and validation
  nlohmann::json description;    // of the tokens, which an unfinished folder must agree on
};

// Returns the scores of the mixers from the entries of the runs, the lowest perplexity first: {"mixer", "lr", "seeds",
// "diverged", "perplexity", "standard_error", "table_1"}. lr is the learning rate at which the first seed has the
// lowest perplexity on the validation tokens; the other fields are over the seeds at this rate. table_1 has {"mean",
// "standard_error"} per column, of the runs that were scored on the tasks. A number is null where no run has it.
nlohmann::ordered_json score_models(const nlohmann::json& settings, const std::vector<nlohmann::ordered_json>& runs);

// Returns the study of the mixers, learning rates and seeds of a plan. A folder may be continued with other mixers,
// learning rates and seeds.
Study table1_study(const Plan& plan, const LmTokens& tokens, const TrainLm& train);

}  // namespace efla::experiments
