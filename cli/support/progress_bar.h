// A bar on a terminal, plain lines now and then elsewhere. Written to standard error.
#pragma once

#include <chrono>
#include <string>

namespace efla::cli {

class ProgressBar {
 public:
  // title opens each line.
  explicit ProgressBar(std::string title);

  // Draws the title, a bar, the share in per cent and the text, unless the last drawing is very recent and the share is
  // below 1. Without a terminal it prints a line if plain_line.
  void draw(double share, const std::string& text, bool plain_line);
  void line(const std::string& text);
  // Takes the bar off a terminal.
  void clear();

  bool terminal() const { return terminal_; }

 private:
  std::string title_;
  bool terminal_;
  std::chrono::steady_clock::time_point last_drawn_;
};

// Returns, for example, "1:02" or "3:00:09".
std::string duration(double seconds);

}  // namespace efla::cli
