// A language model as the scorer of likelihood.h.
#pragma once

#include "efla/nn/models/language_model.h"
#include "efla/train/likelihood.h"

namespace efla::train {

// The model must outlive what is returned, and not train. Logits are computed for the positions that are asked for
// alone, a slice of them at a time.
Scorer make_scorer(const nn::LanguageModel& model);

}  // namespace efla::train
