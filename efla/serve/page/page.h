// The web page of the service, one file that needs no network (cmake/EflaEmbed.cmake).
#pragma once

#include <string_view>

namespace efla::serve {

std::string_view page_html();

}  // namespace efla::serve
