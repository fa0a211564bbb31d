// A language model as the scorer of likelihood.h.
#pragma once

#include "efla/eval/likelihood.h"
#include "efla/nn/models/language_model.h"

namespace efla::eval {

// Returns a scorer, which the model must outlive without being trained. Logits are computed only for the positions that
// are needed, a slice of them at a time.
Scorer make_scorer(const nn::LanguageModel& model);

}  // namespace efla::eval
