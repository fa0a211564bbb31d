// Fields that the server does not use, with the values that ask for what it does anyway.
#pragma once

#include "efla/io/fields.h"

namespace efla::serve {

// Where fields stand.
// anthropic_…: in requests of Anthropic's API.
enum class Place {
  generation,
  stream_options,
  text,
  message,
  content_part,
  anthropic_request,
  anthropic_output,
  anthropic_tool,
  anthropic_block,
};

// Accepts such fields, because clients write out defaults and send back the replies that they got. Throws ApiError for
// a field of this kind with another value. Leaves out fields that the caller has read itself.
void accept_defaults(const io::Fields& fields, Place place);

}  // namespace efla::serve
