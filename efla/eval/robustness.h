// Loss and accuracy on a set of images, undisturbed or under the perturbations of section 5.1 of the EFLA paper.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/base/stop.h"
#include "efla/base/threads.h"
#include "efla/eval/classifier.h"

namespace efla::eval {

struct Evaluation {
  double loss = 0.0;      // mean cross-entropy
  double accuracy = 0.0;  // in [0, 1]
};

// Returns loss and accuracy, with the same bits for any number of threads. seed is the perturbation's. Throws Stopped
// if stop returns true.
Evaluation evaluate(const Classifier& classifier, const data::ImageSet& images, ThreadPool& pool,
                    const Perturbation& perturbation = {}, std::uint64_t seed = 0, const StopFunction& stop = {});

struct Robustness {
  Evaluation clean;
  std::vector<std::vector<double>> accuracy;  // [panel][level] of robustness_panels()
};

// Measures every level of every panel; the levels that disturb nothing share one measurement. progress(done, all)
// counts evaluations.
Robustness measure_robustness(const Classifier& classifier, const data::ImageSet& images, ThreadPool& pool,
                              std::uint64_t seed = 0, const StopFunction& stop = {},
                              const std::function<void(int done, int all)>& progress = {});

// Returns {"clean_accuracy": …, "dropout": [{"p": …, "accuracy": …}], "scale": [{"factor": …}], "noise": [{"sigma":
// …}]}
nlohmann::ordered_json to_json(const Robustness& robustness);

}  // namespace efla::eval
