// The files embedded into the library at build time (cmake/EflaEmbed.cmake).
#pragma once

#include <string_view>

namespace efla::report {

std::string_view chart_js();   // Chart.js, minified, with its licence notice
std::string_view page_html();  // the template: {{name}} marks what is filled in
std::string_view page_css();
std::string_view page_js();

}  // namespace efla::report
