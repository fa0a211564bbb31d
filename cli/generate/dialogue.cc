#include "cli/generate/dialogue.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <system_error>

#include "cli/support/interrupt.h"
#include "cli/support/print.h"

namespace efla::cli {

std::optional<std::string> read_line() {
  const bool terminal = isatty(STDIN_FILENO) == 1;
  for (;;) {
    if (terminal) {
      print_or_drop(stderr, "> ");
    }
    char* text = nullptr;
    std::size_t room = 0;
    errno = 0;
    const auto size = ::getline(&text, &room, stdin);
    const int error = errno;
    const std::unique_ptr<char, decltype(&std::free)> owner(text, &std::free);
    if (size > 0) {
      std::string line(text, static_cast<std::size_t>(size));
      if (line.ends_with('\n')) line.pop_back();
      return line;
    }
    if (std::feof(stdin) != 0) {
      if (terminal) print_or_drop(stderr, "\n");
      return std::nullopt;
    }
    if (error != EINTR) throw std::system_error(error, std::generic_category(), "standard input");
    std::clearerr(stdin);
    forget_interrupt();
    print_or_drop(stderr, "\nCtrl-D ends the program.\n");
  }
}

}  // namespace efla::cli
