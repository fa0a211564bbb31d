// JSON schemas (draft 2020-12) that replies can be forced to follow.
#pragma once

#include <string>
#include <string_view>

namespace efla::serve {

// Returns a schema, given as JSON, for GrammarSource. Every text that follows the result follows the schema. The
// reverse is not true: an object with `properties` and without `additionalProperties` has no others, a schema without
// `type` has the type that its keywords are for, and a pattern matches a whole string. Throws Error about `argument`
// for a keyword that a grammar would ignore, and for a schema that is too large.
std::string prepared_schema(std::string_view json, const std::string& argument);

}  // namespace efla::serve
