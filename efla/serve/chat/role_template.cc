// Chat templates with a text per role.
#include <algorithm>
#include <filesystem>
#include <map>
#include <span>
#include <system_error>

#include "efla/base/error.h"
#include "efla/io/fields.h"
#include "efla/io/toml.h"
#include "efla/serve/chat/chat_template.h"

namespace efla::serve {
namespace {

constexpr std::string_view kContent = "{content}";

// A text of a role, cut at {content}.
struct RoleText {
  std::string before, after;
};

struct RoleTexts {
  std::map<std::string, RoleText> roles = {};
  std::string reply = {};              // what a reply begins with; the reply ends like an assistant's message
  std::vector<std::string> stop = {};  // texts that end a reply
};

RoleText cut(const std::string& text) {
  const auto at = text.find(kContent);
  return {text.substr(0, at), text.substr(at + kContent.size())};
}

class RoleTemplate : public ChatTemplate {
 public:
  RoleTemplate(RoleTexts texts, std::vector<std::string> special)
      : texts_(std::move(texts)), special_(std::move(special)) {
    std::ranges::sort(special_, std::ranges::greater(), &std::string::size);  // at one place the longest counts
  }

  RenderedChat render(const Chat& chat) const override {
    RenderedChat rendered{.text = {""}};
    std::vector<ChatText> beginnings;
    for (const auto& message : chat.messages) {
      const bool continued = chat.continues_last && &message == &chat.messages.back();
      append(rendered.text, message, continued);
      if (message.cached) rendered.beginnings.push_back(rendered.text);
    }
    if (chat.begins_reply && !chat.continues_last) rendered.text.back() += texts_.reply;
    return rendered;
  }
  ChatText continuation(const Chat& chat) const override { return render(chat).text; }
  std::optional<std::string> end_turn() const override { return texts_.roles.at("assistant").after; }
  std::vector<std::string> stop() const override { return texts_.stop; }
  bool writes_bos() const override { return false; }
  std::string_view source(bool) const override { return {}; }

 private:
  // Returns an assistant's content without the blanks that its text has between the beginning of a reply and {content}:
  // a reply begins with these blanks itself, and its client sends them back.
  std::string_view without_blanks(std::string_view before, std::string_view content) const {
    if (!before.starts_with(texts_.reply)) return content;
    const auto blanks = before.substr(texts_.reply.size());
    const bool repeated = blanks.find_first_not_of(" \t\n") == std::string_view::npos && content.starts_with(blanks);
    return repeated ? content.substr(blanks.size()) : content;
  }

  // Appends a message. continued: without what follows its content.
  void append(ChatText& text, const ChatMessage& message, bool continued) const {
    const auto found = texts_.roles.find(message.role);
    if (found == texts_.roles.end()) {
      std::string roles;
      for (const auto& [role, ignored] : texts_.roles) roles += (roles.empty() ? "" : ", ") + role;
      throw TemplateError(400, message.field + ": got " + io::brief(message.role) + ", expected one of " + roles,
                          message.field);
    }
    if (!message.tool_calls.empty()) {
      throw TemplateError(
          400, message.field + ": got calls of tools, expected none, because this chat template does not write them",
          message.field);
    }
    const auto& [before, after] = found->second;
    text.back() += before;
    append_content(text, message.role == "assistant" ? without_blanks(before, message.content)
                                                     : std::string_view(message.content));
    if (!continued) text.back() += after;
  }

  // Appends a client's text, in which the texts of special tokens become pieces.
  void append_content(ChatText& text, std::string_view content) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < content.size();) {
      const auto found =
          std::ranges::find_if(special_, [&](const auto& special) { return content.substr(at).starts_with(special); });
      if (found == special_.end()) {
        ++at;
        continue;
      }
      text.back() += content.substr(done, at - done);
      text.push_back(*found);
      text.emplace_back();
      at += found->size();
      done = at;
    }
    text.back() += content.substr(done);
  }

  RoleTexts texts_;
  std::vector<std::string> special_;
};

RoleTexts plain() {
  return {.roles = {{"system", cut("{content}\n\n")},
                    {"user", cut("User: {content}\n")},
                    {"assistant", cut("Assistant: {content}\n")}},
          .reply = "Assistant:",
          .stop = {"\nUser:"}};
}

RoleTexts chatml() {
  RoleTexts made{.reply = "<|im_start|>assistant\n", .stop = {"<|im_end|>"}};
  for (const std::string role : {"system", "user", "assistant"}) {
    made.roles[role] = cut("<|im_start|>" + role + "\n{content}<|im_end|>\n");
  }
  return made;
}

RoleTexts read_texts(const std::string& path) {
  RoleTexts made;
  const auto table = io::read_toml(path);
  const io::Fields fields(table, io::refuse_in_file(path));
  fields.read("reply", made.reply);
  fields.read("stop", made.stop);
  for (const auto& stop : made.stop) {
    if (stop.empty()) fields.refuse("stop", "texts of at least one character");
  }
  for (const auto& [field, value] : table.items()) {
    if (field == "reply" || field == "stop") continue;
    const auto text = fields.get<std::string>(field);
    if (text.find(kContent) == std::string::npos) {
      fields.refuse(field, "a text with {content} (or \"reply\", \"stop\")");
    }
    made.roles[field] = cut(text);
  }
  for (const char* role : {"user", "assistant"}) {
    if (!made.roles.contains(role)) fields.refuse(role, "a text with {content}");
  }
  return made;
}

}  // namespace

std::shared_ptr<const ChatTemplate> load_chat_template(const std::string& name, std::vector<std::string> special) {
  const auto made = [&](RoleTexts texts) {
    return std::make_shared<RoleTemplate>(std::move(texts), std::move(special));
  };
  if (name == "plain") return made(plain());
  if (name == "chatml") return made(chatml());
  if (std::error_code none; !std::filesystem::exists(name, none)) {
    throw Error("serve", "chat_template", "'" + name + "'", "plain, chatml, or a Jinja or TOML file that exists");
  }
  return made(read_texts(name));
}

}  // namespace efla::serve
