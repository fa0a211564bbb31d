#include "cli/support/progress_bar.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cli/support/print.h"

namespace efla::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBarWidth = 24;
constexpr auto kRedraw = std::chrono::milliseconds(100);

std::string bar(double share) {
  const int full = std::clamp(static_cast<int>(share * kBarWidth), 0, kBarWidth);
  return fmt::format("[{:=<{}}{:{}}]", "", full, "", kBarWidth - full);
}

}  // namespace

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

ProgressBar::ProgressBar(std::string title) : title_(std::move(title)), terminal_(isatty(STDERR_FILENO) == 1) {}

void ProgressBar::clear() {
  if (terminal_) print_or_drop(stderr, "\r\x1b[K");
}

void ProgressBar::draw(double share, const std::string& text, bool plain_line) {
  if (!terminal_) {
    if (plain_line) line(text);
    return;
  }
  const auto now = Clock::now();
  if (share < 1.0 && now - last_drawn_ < kRedraw) return;
  last_drawn_ = now;
  print_or_drop(stderr, fmt::format("\r\x1b[K{}  {} {:3.0f} %  {}", title_, bar(share), 100.0 * share, text));
}

void ProgressBar::line(const std::string& text) {
  print_or_drop(stderr, fmt::format("{}{}  {}\n", terminal_ ? "\r\x1b[K" : "", title_, text));
}

}  // namespace efla::cli
