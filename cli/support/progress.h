// The progress of a training run, as a bar.
#pragma once

#include <cstdint>
#include <string>

#include "cli/support/moving_average.h"
#include "cli/support/progress_bar.h"
#include "efla/train/run.h"

namespace efla::cli {

class Progress {
 public:
  // title opens each line ("efla, seed 1"); steps counts the whole run.
  Progress(std::string title, std::int64_t steps_per_epoch, std::int64_t steps);

  // Returns the events that draw the bar, without `stop`. The events point to this object.
  train::RunEvents events();

  // Draws the bar for work without a loss: "robustness  [====>   ]".
  void count(const std::string& what, int done, int all);

  // Takes the bar off a terminal.
  void clear();

 private:
  void step(const train::StepResult& result, double images_per_second);

  ProgressBar bar_;
  std::int64_t steps_per_epoch_, steps_;
  MovingAverage loss_, accuracy_, images_per_second_, seconds_per_step_;
};

}  // namespace efla::cli
