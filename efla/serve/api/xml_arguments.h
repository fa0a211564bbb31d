// The arguments of a call in Qwen's XML form, as XGrammar's structural tags have them. A header of tool_grammar.cc and
// xml_arguments.cc alone.
#pragma once

#include <string>

#include "efla/io/json_text.h"
#include "efla/serve/chat/tool.h"

namespace efla::serve {

// Returns the format of JSON that follows a prepared schema.
io::JsonText json_value(const std::string& schema);

// Returns the format of a tool's parameters: <parameter=NAME>, a line break, the value, a line break and </parameter>,
// in the order of the schema. Texts stand as they are, other values as JSON. Parameters without a description have no
// form. Throws Error about "tools".
io::JsonText xml_arguments(const Tool& tool);

}  // namespace efla::serve
