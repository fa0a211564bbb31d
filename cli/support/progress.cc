#include "cli/support/progress.h"

#include <fmt/core.h>

#include <utility>

namespace efla::cli {
namespace {

constexpr int kPlainLinesPerEpoch = 5;

}  // namespace

Progress::Progress(std::string title, std::int64_t steps_per_epoch, std::int64_t steps)
    : bar_(std::move(title)), steps_per_epoch_(steps_per_epoch), steps_(steps) {}

train::RunEvents Progress::events() {
  train::RunEvents events;
  events.step = [this](const train::StepResult& result, double rate) { step(result, rate); };
  events.evaluating = [this](std::int64_t step) {
    if (bar_.terminal()) bar_.draw(1.0, fmt::format("epoch {}: testing", step / steps_per_epoch_), false);
  };
  events.evaluated = [this](std::int64_t step, const nlohmann::ordered_json& e) {
    bar_.line(fmt::format("epoch {}: test accuracy {:.2f} %, test loss {:.4f}", step / steps_per_epoch_,
                          100.0 * e.at("accuracy").get<double>(), e.at("loss").get<double>()));
  };
  return events;
}

void Progress::step(const train::StepResult& result, double images_per_second) {
  loss_.add(result.loss);
  accuracy_.add(result.accuracy);
  images_per_second_.add(images_per_second);
  seconds_per_step_.add(static_cast<double>(result.step_examples) / images_per_second);
  const std::int64_t in_epoch = (result.step - 1) % steps_per_epoch_ + 1;
  const bool plain_line =
      in_epoch * kPlainLinesPerEpoch / steps_per_epoch_ != (in_epoch - 1) * kPlainLinesPerEpoch / steps_per_epoch_;
  bar_.draw(static_cast<double>(result.step) / static_cast<double>(steps_),
            fmt::format("epoch {}  loss {:.4f}  accuracy {:.1f} %  {:.0f} images/s  {} left",
                        (result.step - 1) / steps_per_epoch_ + 1, loss_.value(), 100.0 * accuracy_.value(),
                        images_per_second_.value(),
                        duration(seconds_per_step_.value() * static_cast<double>(steps_ - result.step))),
            plain_line);
}

void Progress::count(const std::string& what, int done, int all) {
  bar_.draw(static_cast<double>(done) / all, fmt::format("{} {} of {}", what, done, all), done == all);
}

void Progress::clear() { bar_.clear(); }

}  // namespace efla::cli
