// Checks what a report page does in a browser. For synthetic and for real reports.
#pragma once

#include <string>
#include <vector>

#include "tests/support/browser.h"

namespace efla::test {

// Opens the page and returns a sentence per fault: anything on the console, requests beyond the page itself,
// data-charts that is missing or not the number of canvases, a blank canvas, a canvas without a description or a table
// of its numbers, a page wider than its window.
std::vector<std::string> report_faults(Browser& browser, const std::string& path, const View& view);

}  // namespace efla::test
