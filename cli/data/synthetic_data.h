// efla data show: an example of a synthetic task as people read it.
#pragma once

#include <CLI/CLI.hpp>

namespace efla::cli {

void add_show(CLI::App& data);  // below data

}  // namespace efla::cli
