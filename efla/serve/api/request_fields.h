// Fields that requests of several endpoints have. A header of *requests.cc alone.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "efla/serve/api/fields.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {

inline constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

void read_session_name(const io::Fields& fields, const char* name, std::string& into);
// Reads the fields that all three endpoints share.
void read_common(const io::Fields& fields, GenerationRequest& request);
void read_stream_options(const io::Fields& fields, GenerationRequest& request);
// Reads the fields about sessions and about states in requests.
void read_state(const io::Fields& fields, GenerationRequest& request);
void read_n(const io::Fields& fields, GenerationRequest& request);
// Throws ApiError for several replies if a state is to be kept, because a state belongs to one reply.
void require_one_reply(const GenerationRequest& request);

}  // namespace efla::serve
