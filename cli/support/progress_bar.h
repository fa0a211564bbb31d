// A bar on a terminal, plain lines now and then elsewhere. Written to standard error.
#pragma once

#include <chrono>
#include <string>

namespace efla::cli {

class ProgressBar {
 public:
  // title opens each line.
  explicit ProgressBar(std::string title);

  // "TITLE  [====>   ]  40 %  text"; a share of 1 is always drawn. Where there is no terminal: a line if plain_line.
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

// "1:02" or "3:00:09".
std::string duration(double seconds);

}  // namespace efla::cli
