// A language model as the scorer of likelihood.h.
#pragma once

#include "efla/eval/likelihood.h"
#include "efla/nn/models/language_model.h"

namespace efla::eval {

// Returns a scorer. The model must outlive the scorer, and must not be trained meanwhile. The scorer computes logits
// only for the positions of targets, some positions at a time.
Scorer make_scorer(const nn::LanguageModel& model);

}  // namespace efla::eval
