// One request for text: its prompts go to the engine, its replies come back whole or as a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "efla/serve/api/context.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/http/http.h"

namespace efla::serve {

// Starts a request on the thread for work. Errors become its reply. Throws ApiError where the client has too many
// requests running.
void start_generation(ApiContext& context, GenerationRequest request, const std::string& client,
                      const std::shared_ptr<HttpExchange>& exchange);

// Returns the number of tokens of a chat's prompt. Throws ApiError.
std::int64_t count_prompt(const ApiContext& context, GenerationRequest request, HttpExchange& exchange);

}  // namespace efla::serve
