#include "efla/serve/api/fields.h"

#include "efla/base/error.h"
#include "efla/io/json.h"
#include "efla/serve/api/error.h"

namespace efla::serve {

nlohmann::json parse_body(std::string_view body) {
  try {
    return io::parse_json(io::as_bytes(body), "the request");
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
