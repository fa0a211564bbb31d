// Calls of tools that a model writes as JSON.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

// arguments: as the model wrote them; "{}" where it wrote none.
struct JsonCall {
  std::string name, arguments;
};

// Returns the calls in a JSON text, which may be cut off: an object, or a list of objects, with "name" and "arguments"
// or "parameters". Returns nothing where one of the objects is no call. cut: the model would have continued the text;
// arguments that have not begun are then empty.
std::vector<JsonCall> calls_in_json(std::string_view json, bool cut);

}  // namespace efla::serve
