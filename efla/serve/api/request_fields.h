// Fields that requests of several endpoints have. A header of *requests.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/api/fields.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {

inline constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Returns the name of an element of a list, as in "messages[1]".
inline std::string place(const std::string& list, std::size_t i) { return list + "[" + std::to_string(i) + "]"; }

// Calls f(fields, i) for the objects of a list, one at a time, because the fields of each take memory.
template <class F>
void for_each_object(const io::Fields& fields, const std::string& name, const nlohmann::json& list, const F& f) {
  for (std::size_t i = 0; i < list.size(); ++i) f(fields.within(place(name, i), list[i]), i);
}

// Returns a field that is a list, nullptr if it is missing.
const nlohmann::json* find_list(const io::Fields& fields, const std::string& name, const std::string& expected);
// Reads the mark of Anthropic's API on a part of a message: {"type": "ephemeral"}. Returns whether it is there.
bool read_cache_control(const io::Fields& fields);
// Throws ApiError where more messages of the field have the mark than a request may have.
void require_few_marks(const std::vector<ChatMessage>& chat, const std::string& name);

void read_session_name(const io::Fields& fields, const char* name, std::string& into);
// Reads the fields that all endpoints share. stop: the name of the field with the texts that end a reply.
void read_common(const io::Fields& fields, GenerationRequest& request, const std::string& stop = "stop");
void read_stream_options(const io::Fields& fields, GenerationRequest& request);
// Reads the fields about sessions and about states in requests.
void read_state(const io::Fields& fields, GenerationRequest& request);
// Reads what the replies must be: response_format, `text` and structured_outputs. text: of the body.
void read_structured_output(const io::Fields& fields, std::string_view text, GenerationRequest& request);
// Reads the same of Anthropic's API: output_config.
void read_output_config(const io::Fields& fields, std::string_view text, GenerationRequest& request);
// Reads the schema of a tool's arguments, the field `name`, if calls must follow it: of strict tools, and where the
// reply must call this tool. written: the object around the field.
void read_strict(const io::Fields& fields, std::string_view written, const char* name, Tool& tool,
                 GenerationRequest& request);
// Throws ApiError unless there is a tool that the reply must call.
void require_called(const GenerationRequest& request);
void read_n(const io::Fields& fields, GenerationRequest& request);
// Throws ApiError for several replies if a state is to be kept, because a state belongs to one reply.
void require_one_reply(const GenerationRequest& request);

}  // namespace efla::serve
