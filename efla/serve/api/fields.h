// Reads what a client sent.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "efla/io/fields.h"
#include "efla/io/json.h"

namespace efla::serve {

// Parses the body of a request, whose memory it reports to `hold`. Throws ApiError with status 400 that names the byte
// where it is not JSON, and what `hold` throws.
io::JsonDocument parse_body(std::string_view body, io::JsonDocument::Hold hold = {});

// Returns the fields of a request, whose functions throw ApiError with status 400.
io::Fields fields_of(const nlohmann::json& body);

// Throws ApiError with the code unknown_field for a field that nobody has read.
void refuse_others(const io::Fields& fields);

}  // namespace efla::serve
