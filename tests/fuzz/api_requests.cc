#include "efla/serve/api/requests.h"

#include <array>

#include "efla/base/utf8.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void api_requests(io::ByteView bytes) {
  if (bytes.empty()) return;
  using Parse = void (*)(const nlohmann::json&);
  static constexpr std::array<Parse, 8> kParse{
      [](const nlohmann::json& body) {
        const auto request = serve::parse_completion(body);
        require(!request.prompts.empty() && request.n >= 1, "a prompt and a reply");
      },
      [](const nlohmann::json& body) {
        const auto request = serve::parse_chat(body);
        require(!request.chat.empty(), "a message");
        try {
          serve::load_chat_template("chatml").render(request.chat);
        } catch (const serve::ApiError& error) {
          require(error.param == "messages", "an error about messages");
        }
      },
      [](const nlohmann::json& body) { serve::parse_response(body); },
      [](const nlohmann::json& body) { serve::parse_tokenize(body); },
      [](const nlohmann::json& body) { serve::parse_detokenize(body); },
      [](const nlohmann::json& body) { serve::parse_create_session(body); },
      [](const nlohmann::json& body) { serve::parse_fork(body); },
      [](const nlohmann::json& body) { serve::parse_rewind(body); },
  };
  const std::string_view body(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
  try {
    kParse[bytes[0] % kParse.size()](serve::parse_body(body));
  } catch (const serve::ApiError& error) {
    require(error.status == 400, "an error of the client");
    require(!error.message.empty() && error.message.size() < 2000, "a short message");
    const auto reply = serve::to_reply(error).body;
    require(utf8_prefix(reply) == reply.size(), "a reply in UTF-8");
    require(nlohmann::json::parse(reply)["error"]["message"] == error.message, "a reply with the message");
  }
}

}  // namespace efla::fuzz
