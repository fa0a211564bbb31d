// Opens a report in headless chromium, saves a picture of the whole page and says what is wrong with it:
// efla_open_page REPORT.html WIDTH light|dark OUT.png
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "tests/support/report_check.h"

int main(int argc, char** argv) try {
  const std::string theme = argc == 5 ? argv[3] : "";
  if (theme != "light" && theme != "dark") {
    std::cerr << "usage: efla_open_page REPORT.html WIDTH light|dark OUT.png\n";
    return 2;
  }
  efla::test::Browser browser;
  const efla::test::View view{.width = std::atoi(argv[2]), .dark = theme == "dark"};
  const auto faults = efla::test::report_faults(browser, argv[1], view);
  for (const auto& fault : faults) std::cout << fault << '\n';
  browser.screenshot(argv[4]);
  return faults.empty() ? 0 : 1;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 1;
}
