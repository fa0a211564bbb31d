// A server with a chat template in Jinja, and what its tests send.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "efla/serve/chat/jinja_template.h"
#include "tests/serve/service_fixture.h"
#include "tests/support/special_tokens.h"

namespace efla::serve {

inline const std::vector<std::string> kSpecial{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

class ServiceChatTest : public ServiceTest {
 protected:
  // Starts a server with a template in Jinja. Returns false where jinja2 is missing.
  bool start_with(const std::string& chat_template, const std::string& script) {
    tokenizer_ = test::tokenizer_with_special_tokens();
    options_.chat = make_jinja_template({.file = "t.jinja", .templates = {{"default", chat_template}}}, kSpecial);
    if (options_.chat == nullptr) return false;
    start(script);
    return true;
  }
  // The text of the last prompt, with the texts of its special tokens.
  std::string prompt() const {
    std::string text;
    const auto& tokenizer = *engine_->info().tokenizer;
    for (const auto id : engine_->last().prompt) {
      const auto special = tokenizer.special_texts().find(id);
      text += special == tokenizer.special_texts().end() ? std::string(tokenizer.bytes_of(id)) : special->second;
    }
    return text;
  }
  std::ptrdiff_t special_tokens() const {
    return std::ranges::count_if(engine_->last().prompt, [](std::int32_t id) { return id >= test::kTextEnd; });
  }
};

inline constexpr const char* kChatml =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

// With reasoning, and with tools in XML.
inline const std::string kThinking =
    std::string(kChatml) + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}{# </think> #}";
inline const std::string kTools = "{{ tools | tojson if tools }}{# <tool_call><function= #}" + kThinking;

inline constexpr const char* kReply =
    "why\n</think>\n\nI "
    "look.\n\n<tool_call>\n<function=get>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>$";

}  // namespace efla::serve
