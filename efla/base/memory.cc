#include "efla/base/memory.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "efla/base/error.h"

namespace efla {
namespace {

std::string gigabytes(const char* format, double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, format, bytes / 1e9);
  return text;
}

}  // namespace

double machine_memory_bytes() { return double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE)); }

void require_memory(const char* operation, const char* argument, const char* what, double bytes) {
  const double memory = machine_memory_bytes();
  if (bytes <= memory) return;
  throw Error(operation, argument, what + (" of " + gigabytes("%.4g", bytes)) + " GB",
              "at most this machine's memory of " + gigabytes("%.1f", memory) + " GB");
}

}  // namespace efla
