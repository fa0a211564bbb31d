#include "cli/support/print.h"

#include <cerrno>
#include <system_error>

namespace efla::cli {
namespace {

int dropped = 0;  // errno of the first text that standard output did not take

}  // namespace

void print_or_drop(std::FILE* stream, std::string_view text) noexcept {
  const bool written = std::fwrite(text.data(), 1, text.size(), stream) == text.size() && std::fflush(stream) == 0;
  if (!written && stream == stdout && dropped == 0) dropped = errno;
}

void flush_standard_output() {
  const bool failed_before = std::ferror(stdout) != 0;  // in a print whose result nobody checked
  if (std::fflush(stdout) == 0 && !failed_before) return;
  const int reason = !failed_before ? errno : dropped != 0 ? dropped : EIO;
  throw std::system_error(reason, std::generic_category(), "standard output");
}

}  // namespace efla::cli
