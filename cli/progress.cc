#include "cli/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace efla::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBarWidth = 24;
constexpr int kPlainLinesPerEpoch = 5;
constexpr auto kRedraw = std::chrono::milliseconds(100);

std::string bar(double share) {
  const int full = std::clamp(static_cast<int>(share * kBarWidth), 0, kBarWidth);
  return fmt::format("[{:=<{}}{:{}}]", "", full, "", kBarWidth - full);
}

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

}  // namespace

Progress::Progress(std::string title, std::int64_t steps_per_epoch, std::int64_t steps)
    : title_(std::move(title)), steps_per_epoch_(steps_per_epoch), steps_(steps), terminal_(isatty(STDERR_FILENO)) {}

train::RunEvents Progress::events() {
  train::RunEvents events;
  events.step = [this](const train::StepResult& result, double rate, double) { step(result, rate); };
  events.evaluating = [this](std::int64_t epoch) {
    if (terminal_) draw(1.0, fmt::format("epoch {}: testing", epoch), false);
  };
  events.evaluated = [this](std::int64_t epoch, const train::Evaluation& e) {
    line(fmt::format("epoch {}: test accuracy {:.2f} %, test loss {:.4f}", epoch, 100.0 * e.accuracy, e.loss));
  };
  return events;
}

void Progress::step(const train::StepResult& result, double images_per_second) {
  // Weights of the newest step: that of a plain mean first, a twentieth later on.
  const double weight = std::max(1.0 / static_cast<double>(++drawn_), 0.05);
  const auto follow = [weight](double& mean, double value) { mean += weight * (value - mean); };
  follow(loss_, result.loss);
  follow(accuracy_, result.accuracy);
  follow(images_per_second_, images_per_second);
  follow(seconds_per_step_, static_cast<double>(result.images) / images_per_second);
  const std::int64_t in_epoch = (result.step - 1) % steps_per_epoch_ + 1;
  const bool plain_line =
      in_epoch * kPlainLinesPerEpoch / steps_per_epoch_ != (in_epoch - 1) * kPlainLinesPerEpoch / steps_per_epoch_;
  draw(static_cast<double>(result.step) / static_cast<double>(steps_),
       fmt::format("epoch {}  loss {:.4f}  accuracy {:.1f} %  {:.0f} images/s  {} left", result.epoch, loss_,
                   100.0 * accuracy_, images_per_second_,
                   duration(seconds_per_step_ * static_cast<double>(steps_ - result.step))),
       plain_line);
}

void Progress::count(const std::string& what, int done, int all) {
  draw(static_cast<double>(done) / all, fmt::format("{} {} of {}", what, done, all), done == all);
}

void Progress::clear() {
  if (terminal_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::draw(double share, const std::string& text, bool plain_line) {
  if (!terminal_) {
    if (plain_line) line(text);
    return;
  }
  const auto now = Clock::now();
  if (share < 1.0 && now - last_drawn_ < kRedraw) return;
  last_drawn_ = now;
  fmt::print(stderr, "\r\x1b[K{}  {} {:3.0f} %  {}", title_, bar(share), 100.0 * share, text);
  std::fflush(stderr);
}

void Progress::line(const std::string& text) {
  fmt::print(stderr, "{}{}  {}\n", terminal_ ? "\r\x1b[K" : "", title_, text);
}

}  // namespace efla::cli
