#include "efla/base/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include "efla/base/error.h"

namespace efla {
namespace {

std::string gigabytes(const char* format, double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, format, bytes / 1e9);
  return text;
}

// Returns the path of the process's control group (cgroup v2); "/" if it is not known.
std::filesystem::path own_group() {
  constexpr std::string_view kUnified = "0::";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.starts_with(kUnified)) return line.substr(kUnified.size());
  }
  return "/";
}

}  // namespace

double group_memory_bytes(const std::filesystem::path& root, const std::filesystem::path& group) {
  double least = std::numeric_limits<double>::infinity();
  std::filesystem::path folder = root / group.relative_path();
  for (;; folder = folder.parent_path()) {
    double limit = 0.0;  // the file has "max" instead of a number if there is no limit
    if (std::ifstream(folder / "memory.max") >> limit) least = std::min(least, limit);
    if (folder == root || folder == folder.parent_path()) return least;
  }
}

double usable_memory_bytes() {
  const double machine = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE));
  return std::min(machine, group_memory_bytes("/sys/fs/cgroup", own_group()));
}

void require_memory(const char* operation, const char* argument, const char* what, double bytes) {
  const double memory = usable_memory_bytes();
  if (bytes <= memory) return;
  throw Error(operation, argument, what + (" of " + gigabytes("%.4g", bytes)) + " GB",
              "at most the " + gigabytes("%.1f", memory) + " GB of memory that this process may use");
}

}  // namespace efla
