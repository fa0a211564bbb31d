// Drives Debian's chromium, headless, over its DevTools pipe: opens local pages and reports what happened there.
#pragma once

#include <sys/types.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::test {

struct View {
  int width = 1280;
  int height = 900;
  bool dark = false;  // prefers-color-scheme
};

struct ConsoleLine {
  std::string level;  // log, info, warning, error, …; an uncaught exception is an error
  std::string text;
};

class Browser {
 public:
  // Starts chromium with an empty profile. Throws std::runtime_error that names the Debian package if it cannot.
  Browser();
  ~Browser();
  Browser(const Browser&) = delete;
  Browser& operator=(const Browser&) = delete;

  // Opens a file, or an address that begins with http://, in a new tab, which replaces the last one, and waits until
  // the JavaScript expression `ready` is true. Throws std::runtime_error after 30 seconds.
  void open(const std::string& path, const View& view, const std::string& ready = "document.readyState === 'complete'");

  nlohmann::json evaluate(const std::string& expression);  // returns a JSON value; throws if the expression does
  std::string dom();
  void screenshot(const std::string& path);  // saves the whole page as PNG

  // Since the last open():
  const std::vector<ConsoleLine>& console() const { return console_; }
  const std::vector<std::string>& requests() const { return requests_; }  // URLs, the page itself first

 private:
  nlohmann::json call(const std::string& method, nlohmann::json params = nlohmann::json::object());
  void handle(const nlohmann::json& event);
  nlohmann::json receive();
  void start(int commands, int replies);
  void stop();

  pid_t process_ = -1;
  int to_ = -1, from_ = -1;  // pipes of JSON messages, each terminated by a zero byte
  std::string profile_, session_, target_, buffer_;
  int last_id_ = 0;
  std::vector<ConsoleLine> console_;
  std::vector<std::string> requests_;
};

}  // namespace efla::test
