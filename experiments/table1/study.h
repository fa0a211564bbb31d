// Table 1 of the EFLA paper: which language models are trained, and the table of their perplexities.
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

// Trains a language model of a configuration {"model", "data", "training"} in an existing folder, from the checkpoint
// there if there is one, and leaves run.json and metrics.jsonl. The folder has a result of `efla train lm`.
using TrainLm =
    std::function<LmEnd(const nlohmann::json& config, const std::filesystem::path& folder, const RunContext& context)>;

// Returns the rows of table 1 from the entries of its runs: for each mixer the learning rate with the lowest perplexity
// of the first seed, and {"mixer", "lr", "seeds", "diverged", "perplexity", "standard_error"} over the seeds at it,
// those with the lowest perplexity first. perplexity is null where all runs diverged.
nlohmann::ordered_json score_models(const nlohmann::json& settings, const std::vector<nlohmann::ordered_json>& runs);

// Returns the study on the token folders train and validation in `tokens`.
Study table1_study(const Plan& plan, const std::filesystem::path& tokens, const TrainLm& train);

}  // namespace efla::experiments
