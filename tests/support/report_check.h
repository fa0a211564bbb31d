// Whether a report page does in a browser what it should. For synthetic and for real reports.
#pragma once

#include <string>
#include <vector>

#include "tests/support/browser.h"

namespace efla::test {

// Opens the page and says, in a sentence each, what is wrong: anything on the console at all, requests beyond the page
// itself, data-charts not set or not the number of canvases, a blank canvas, a canvas without a description or a table
// of its numbers, a page wider than its window.
std::vector<std::string> report_faults(Browser& browser, const std::string& path, const View& view);

}  // namespace efla::test
