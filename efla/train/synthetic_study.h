// The synthetic studies: MAD (table 2 of the EFLA paper), MQAR's standard set, length extrapolation (table 1 of the
// exponential-integrator paper), and state tracking. Which runs each has at which scale, and their results.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/train/synthetic_run.h"

namespace efla::train {

enum class Study { mad, mqar, extrapolation, state_tracking };

// tiny: minutes on two cores, to see that everything runs. small: an hour or so. paper: the papers' sizes and steps.
enum class Scale { tiny, small, paper };

std::string_view study_name(Study study);
std::string_view scale_name(Scale scale);
// Throws Error for a name that is not "tiny", "small" or "paper".
Scale scale_from_name(std::string_view name);

struct SyntheticStudyOptions {
  Study study = Study::mad;
  Scale scale = Scale::small;
  std::vector<std::string> mixers;   // none: those that the study compares
  std::vector<std::uint64_t> seeds;  // none: the scale's
  std::vector<double> lrs;           // none: the scale's
};

// The options with what they leave open filled in. Throws Error for a value given twice.
SyntheticStudyOptions completed(SyntheticStudyOptions options);

// Every run: seeds × tasks × settings × mixers × learning rates × weight decays. Throws Error for what no run could be
// made of.
std::vector<SyntheticRun> plan_synthetic(const SyntheticStudyOptions& options);

// The "scores" of results.json from its "runs": for each task and mixer {"task", "mixer", "settings", "seeds", "runs",
// "diverged", "lr", "weight_decay", "accuracy": [{"length", "pairs", "mean", "std", "paper", "paper_std"}]}, pairs in
// the study of MQAR's standard set alone. In each setting the learning rate and weight decay with the highest mean over
// seeds on the first test count (for MQAR's standard set on the five of at most its longest examples), a run that
// diverged as 0; a seed's figure is the mean over settings, and mean and std (n − 1; null for one seed) are over seeds
// whose runs did not diverge. lr and weight_decay are null where settings differ in them, paper where the papers have
// no figure.
nlohmann::ordered_json summarize_synthetic(const SyntheticStudyOptions& options,
                                           const std::vector<nlohmann::ordered_json>& runs);

// {mixer: [[x, value], …]}: the eigenvalue of a token's transition along its key by x = β‖k‖², over what the mixer's β
// and norm of k allow. For mixers of a delta rule without decay.
nlohmann::ordered_json eigenvalues(const std::vector<std::string>& mixers);

}  // namespace efla::train
