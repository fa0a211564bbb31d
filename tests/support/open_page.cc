// Opens a page in headless chromium, prints its console and the requests it made, and saves a picture of all of it:
// efla_open_page FILE.html WIDTH light|dark OUT.png
#include <cstdlib>
#include <iostream>

#include "tests/support/browser.h"

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::cerr << "usage: efla_open_page FILE.html WIDTH light|dark OUT.png\n";
    return 2;
  }
  efla::test::Browser browser;
  browser.open(argv[1], {.width = std::atoi(argv[2]), .dark = std::string(argv[3]) == "dark"});
  for (const auto& line : browser.console()) std::cout << line.level << ": " << line.text << '\n';
  for (const auto& url : browser.requests()) std::cout << "request: " << url.substr(0, 200) << '\n';
  browser.screenshot(argv[4]);
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 1;
}
