// The web page of the service: one text that needs no network. Its parts are embedded (cmake/EflaEmbed.cmake).
#pragma once

#include <string>
#include <string_view>

namespace efla::serve {

std::string_view page_html(), page_css(), common_js(), text_js(), chat_js(), page_js();

// Returns the page, with its style and its scripts.
std::string web_page();

}  // namespace efla::serve
