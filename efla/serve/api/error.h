// An error that a client gets, in the shape of OpenAI's or Anthropic's API.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "efla/serve/http/http.h"

namespace efla::serve {

struct ApiError : std::exception {
  ApiError(int status, std::string message, std::string param = {}, std::string code = {})
      : status(status), message(std::move(message)), param(std::move(param)), code(std::move(code)) {}

  const char* what() const noexcept override { return message.c_str(); }

  int status;
  std::string message;
  std::string param, code;  // empty: null
  std::string allow = {};   // of status 405: the methods of the path
};

// openai: {"error": {message, type, param, code}}; anthropic: {"type": "error", "error": {type, message, details}},
// with the code, if there is one, as error_code of the details.
enum class ErrorShape { openai, anthropic };

std::string to_json(const ApiError& error, ErrorShape shape = ErrorShape::openai);

// Returns the reply with an error; with Retry-After for 429 and 503, and without a second try by the clients of both
// APIs for 500.
HttpReply to_reply(const ApiError& error, ErrorShape shape = ErrorShape::openai);

// Returns the exception that is being handled as an error of the API, with names of sessions as the client knows them.
// An exception that nobody expects has status 500.
ApiError current_error(const std::string& client);

}  // namespace efla::serve
