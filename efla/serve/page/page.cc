#include "efla/serve/page/page.h"

#include <initializer_list>

namespace efla::serve {
namespace {

void fill(std::string& page, std::string_view mark, std::initializer_list<std::string_view> parts) {
  std::string all;
  for (const auto& part : parts) all += part;
  page.replace(page.find(mark), mark.size(), all);
}

}  // namespace

std::string web_page() {
  std::string page(page_html());
  fill(page, "{{style}}", {page_css()});
  fill(page, "{{script}}", {common_js(), text_js(), chat_js(), page_js()});
  return page;
}

}  // namespace efla::serve
