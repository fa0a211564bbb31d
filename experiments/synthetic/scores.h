// The scores of a study of synthetic tasks, from its runs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::experiments {

// Returns the "scores" of results.json from its "runs": for each task and mixer {"task", "mixer", "settings", "seeds",
// "runs", "diverged", "lr", "weight_decay", "accuracy": [{"length", "pairs", "mean", "std", "paper", "paper_std"}]}.
// pairs is there where the tests differ in it. In each setting the learning rate and weight decay with the highest mean
// over seeds and the first deciding_tests tests count; a run that diverged has accuracy 0 there. The figure of a seed
// is the mean over settings; mean and std (n − 1; null for one seed) are over the `seeds` seeds whose runs did not
// diverge, and null without one. lr and weight_decay are null where the settings differ in them, paper where `figures`
// has none. `settings` come from a plan (plan.h).
nlohmann::ordered_json score_runs(const nlohmann::json& settings, const std::vector<nlohmann::ordered_json>& runs);

// Returns {mixer: [[x, value], …]}: the eigenvalue of a token's transition along its key by x = β‖k‖², over the x that
// the mixer's β and norm of k allow. For mixers of a delta rule without decay and with one step per token.
nlohmann::ordered_json eigenvalues(const std::vector<std::string>& mixers);

}  // namespace efla::experiments
