// A model of an engine as the scorer of efla/eval/likelihood.h.
#pragma once

#include <cstdint>
#include <memory>

#include "efla/base/threads.h"
#include "efla/engine/model.h"
#include "efla/eval/likelihood.h"

namespace efla::cli {

// Returns a scorer, which takes all slots of the model. It reads several rows together, each up to its last target, and
// computes logits only for the positions of targets. A row has at most `longest` tokens. The pool must outlive the
// scorer.
eval::Scorer make_scorer(std::shared_ptr<engine::EngineModel> model, std::int64_t longest, ThreadPool& pool);

}  // namespace efla::cli
