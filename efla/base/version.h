// What this program was built from.
#pragma once

#include <string_view>

namespace efla {

std::string_view version();  // "0.1.0"
std::string_view commit();   // git describe, with -dirty for a changed tree; "unknown" outside a git checkout

}  // namespace efla
