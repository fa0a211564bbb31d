#include "efla/serve/chat/json_calls.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

// Returns the text of a string in JSON; "" for what is none.
std::string text_of(std::string_view json) {
  const auto value = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  return value.is_string() ? value.get<std::string>() : std::string();
}

// Returns the call that an object is. Its name is empty where the object is none.
JsonCall call_of(std::string_view object, bool cut) {
  JsonCall call{.name = {}, .arguments = cut ? "" : "{}"};
  for (const auto& member : json_members(object)) {
    const bool is_text = member.whole && member.value.starts_with('"');
    if (member.name == "name" && is_text) {
      call.name = text_of(member.value);
    } else if (member.name == "arguments" || member.name == "parameters") {
      call.arguments = is_text ? text_of(member.value) : std::string(member.value);  // a text of JSON
    }
  }
  return call;
}

}  // namespace

std::vector<JsonCall> calls_in_json(std::string_view json, bool cut) {
  std::vector<JsonCall> calls;
  if (!json.starts_with('[')) {
    calls.push_back(call_of(json, cut));
  } else {
    for (const auto element : json_elements(json)) calls.push_back(call_of(element, /*cut=*/false));
  }
  for (const auto& call : calls) {
    if (call.name.empty()) return {};
  }
  return calls;
}

}  // namespace efla::serve
