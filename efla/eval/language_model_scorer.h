// A language model as the scorer of likelihood.h.
#pragma once

#include "efla/eval/likelihood.h"
#include "efla/nn/models/language_model.h"

namespace efla::eval {

// The model must outlive what is returned, and not train. Logits are computed for the positions that are asked for
// alone, a slice of them at a time.
Scorer make_scorer(const nn::LanguageModel& model);

}  // namespace efla::eval
