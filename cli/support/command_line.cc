#include "cli/support/command_line.h"

#include <fstream>
#include <iterator>

namespace efla::cli {

std::string shell_word(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:+@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string words((std::istreambuf_iterator<char>(file)), {});
  std::string line;
  for (std::size_t at = 0; at < words.size(); at = words.find('\0', at) + 1) {
    line += (line.empty() ? "" : " ") + shell_word(words.c_str() + at);
    if (words.find('\0', at) == std::string::npos) break;
  }
  return line;
}

}  // namespace efla::cli
