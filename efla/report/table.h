// A table as HTML.
#pragma once

#include "efla/report/report.h"

namespace efla::report {

// Returns a table that scrolls in its box where it is too wide.
std::string table_html(const Table& table);

}  // namespace efla::report
