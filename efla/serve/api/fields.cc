#include "efla/serve/api/fields.h"

#include <utility>

#include "efla/base/error.h"
#include "efla/serve/api/error.h"

namespace efla::serve {

io::JsonDocument parse_body(std::string_view body, io::JsonDocument::Hold hold) {
  try {
    return io::JsonDocument(io::as_bytes(body), "the request", 0, std::move(hold));
  } catch (const IoError& error) {
    throw ApiError(400, error.what());
  }
}

io::Fields fields_of(const nlohmann::json& body) {
  return {body, [](const std::string& field, const std::string& got, const std::string& expected) {
            const auto name = field.empty() ? "the request" : field;
            throw ApiError(400, name + ": got " + got + ", expected " + expected, field);
          }};
}

void refuse_others(const io::Fields& fields) {
  try {
    fields.refuse_others();
  } catch (ApiError& error) {
    error.code = "unknown_field";
    throw;
  }
}

}  // namespace efla::serve
