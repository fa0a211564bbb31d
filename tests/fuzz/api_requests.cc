#include "efla/serve/api/requests.h"

#include <array>

#include "efla/base/utf8.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/chat/chat_template.h"
#include "efla/serve/chat/json_slices.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void api_requests(io::ByteView bytes) {
  if (bytes.empty()) return;
  using Parse = void (*)(const nlohmann::json&, std::string_view);
  static constexpr std::array<Parse, 10> kParse{
      [](const nlohmann::json& body, std::string_view text) {
        const auto request = serve::parse_completion(body, text);
        require(!request.prompts.empty() && request.n >= 1, "a prompt and a reply");
        require(!request.grammar || !request.grammar->text.empty(), "a grammar");
      },
      [](const nlohmann::json& body, std::string_view text) {
        const auto request = serve::parse_chat(body, text);
        require(!request.chat.messages.empty(), "a message");
        require(request.chat.tools.empty() || nlohmann::json::accept(request.chat.tools), "tools in JSON");
        require(request.chat.variables.empty() || serve::is_json_object(request.chat.variables), "variables in JSON");
        try {
          serve::load_chat_template("chatml")->render(request.chat);
        } catch (const serve::TemplateError& error) {
          require(error.field.starts_with("messages["), "an error about a message");
        }
      },
      [](const nlohmann::json& body, std::string_view text) { serve::parse_response(body, text); },
      [](const nlohmann::json& body, std::string_view) { serve::parse_tokenize(body); },
      [](const nlohmann::json& body, std::string_view) { serve::parse_detokenize(body); },
      [](const nlohmann::json& body, std::string_view) { serve::parse_create_session(body); },
      [](const nlohmann::json& body, std::string_view) { serve::parse_fork(body); },
      [](const nlohmann::json& body, std::string_view) { serve::parse_rewind(body); },
      [](const nlohmann::json& body, std::string_view text) {
        const auto request = serve::parse_message(body, text);
        require(!request.chat.messages.empty(), "a message");
        require(request.chat.tools.empty() || nlohmann::json::accept(request.chat.tools), "tools in JSON");
        for (const auto& message : request.chat.messages) {
          for (const auto& call : message.tool_calls) require(serve::is_json_object(call.arguments), "arguments");
        }
      },
      [](const nlohmann::json& body, std::string_view text) { serve::parse_message_count(body, text); },
  };
  const std::string_view body(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
  try {
    kParse[bytes[0] % 16 % kParse.size()](serve::parse_body(body), body);
  } catch (const serve::ApiError& error) {
    require(error.status == 400, "an error of the client");
    require(!error.message.empty() && error.message.size() < 2000, "a short message");
    const auto reply = serve::to_reply(error).body;
    require(utf8_prefix(reply) == reply.size(), "a reply in UTF-8");
    require(nlohmann::json::parse(reply)["error"]["message"] == error.message, "a reply with the message");
  }
}

}  // namespace efla::fuzz
