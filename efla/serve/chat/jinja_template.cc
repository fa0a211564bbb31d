#include "efla/serve/chat/jinja_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/data/tokenizers/tokenizer_config.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/json.h"
#include "efla/io/json_text.h"

namespace efla::serve {
namespace {

using io::JsonText;

constexpr const char *kDefault = "default", *kToolUse = "tool_use";

std::string read_text(const std::filesystem::path& path) {
  const auto bytes = io::read_file(path);
  return {bytes.begin(), bytes.end()};
}

// Returns the texts of special tokens by the names that templates use.
std::map<std::string, std::string> variables_of(const std::filesystem::path& model) {
  std::map<std::string, std::string> variables;
  const auto path = io::is_gguf(model) ? model : model / data::kTokenizerConfigFile;
  for (const auto& name : data::read_tokenizer_config(path.string()).names) {
    if (name.field.ends_with("_token")) variables[name.field] = name.text;
  }
  return variables;
}

// Reads the field chat_template of tokenizer_config.json: a text, or a list of {name, template}.
std::map<std::string, std::string> read_field(const io::Fields& config) {
  const auto* value = config.find("chat_template");
  if (value == nullptr) return {};
  if (value->is_string()) return {{kDefault, value->get<std::string>()}};
  std::map<std::string, std::string> templates;
  for (const auto& one : config.objects("chat_template")) {
    templates[one.get<std::string>("name")] = one.get<std::string>("template");
  }
  if (!templates.contains(kDefault))
    config.refuse("chat_template", "a text, or templates of which one has the name \"default\"");
  return templates;
}

JsonText call_json(const ToolCall& call) {
  return {{"id", call.id},
          {"type", "function"},
          {"function", {{"name", call.name}, {"arguments", JsonText::json(call.arguments)}}}};
}

// Returns a message as templates expect it.
JsonText message_json(const ChatMessage& message) {
  JsonText json{{"role", message.role}, {"content", message.content}};
  if (!message.reasoning.empty()) {
    json.add("reasoning_content", message.reasoning);
    json.add("thinking", message.reasoning);  // the name in some templates
  }
  if (!message.tool_calls.empty()) {
    JsonText calls = JsonText::array();
    for (const auto& call : message.tool_calls) calls.push_back(call_json(call));
    json.add("tool_calls", calls);
  }
  if (!message.tool_call_id.empty()) json.add("tool_call_id", message.tool_call_id);
  if (!message.name.empty()) json.add("name", message.name);
  return json;
}

// Returns the variables of a chat.
JsonText context_json(const Chat& chat) {
  JsonText messages = JsonText::array();
  for (const auto& message : chat.messages) messages.push_back(message_json(message));
  JsonText context{{"messages", messages}, {"add_generation_prompt", chat.begins_reply && !chat.continues_last}};
  if (!chat.tools.empty()) context.add("tools", JsonText::json(chat.tools));
  if (!chat.documents.empty()) context.add("documents", JsonText::json(chat.documents));
  if (!chat.variables.empty()) context.add_all(JsonText::json(chat.variables));
  return context;
}

// Python or jinja2 is missing.
struct NoJinja {};

class JinjaTemplate : public ChatTemplate {
 public:
  JinjaTemplate(JinjaSource source, const std::vector<std::string>& special, const WorkerLimits& limits)
      : source_(std::move(source)), workers_(setup(special, limits), limits) {
    const auto reply = start();
    if (reply.contains("missing")) throw NoJinja();
    if (const auto* why = io::Fields(reply, io::refuse_in_file(source_.file)).find("refused")) {
      io::fail_in(source_.file, "not a chat template: " + why->get<std::string>());
    }
    try {
      end_turn_ = joined(texts_of(request({.messages = {}, .begins_reply = false}, true)).at(0));
    } catch (const TemplateError&) {  // texts of this template cannot be continued
    }
  }

  RenderedChat render(const Chat& chat) const override {
    check_roles(chat);
    auto texts = texts_of(request(chat, false));
    RenderedChat rendered{.text = std::move(texts.at(0))};
    std::copy_if(std::make_move_iterator(texts.begin() + 1), std::make_move_iterator(texts.end()),
                 std::back_inserter(rendered.beginnings), [](const ChatText& text) { return !text.empty(); });
    return rendered;
  }

  ChatText continuation(const Chat& chat) const override {
    check_roles(chat);
    auto text = std::move(texts_of(request(chat, true)).at(0));
    if (!end_turn_ || !text.front().starts_with(*end_turn_)) {
      throw TemplateError(400,
                          "the chat template of this model writes a reply differently once more messages follow it, so "
                          "that no session or response can be continued: send the whole chat");
    }
    text.front().erase(0, end_turn_->size());
    return text;
  }

  std::optional<std::string> end_turn() const override { return end_turn_; }
  std::vector<std::string> stop() const override { return {}; }
  bool writes_bos() const override { return true; }
  std::string_view source(bool tools) const override {
    return source_.templates.at(tools && source_.templates.contains(kToolUse) ? kToolUse : kDefault);
  }

 private:
  nlohmann::json start() {
    try {
      return io::parse_json(io::as_bytes(workers_.start()), source_.file);
    } catch (const NoPython&) {
      throw NoJinja();
    } catch (const TemplateError& error) {
      io::fail_in(source_.file, "not a chat template: " + error.message);
    }
  }

  std::string setup(const std::vector<std::string>& special, const WorkerLimits& limits) const {
    JsonText templates = JsonText::object(), variables = JsonText::object(), texts = JsonText::array();
    for (const auto& [name, text] : source_.templates) templates.add(name, text);
    for (const auto& [name, text] : source_.variables) variables.add(name, text);
    for (const auto& text : special) texts.push_back(text);
    return JsonText{{"templates", templates},
                    {"variables", variables},
                    {"special", texts},
                    {"seconds", static_cast<double>(limits.time.count()) / 1e3},
                    {"memory", limits.memory}}
        .text();
  }

  // A template may write a role between the halves of a special token's text.
  void check_roles(const Chat& chat) const {
    constexpr std::string_view kRoles[] = {"system", "user", "assistant", "tool"};
    for (const auto& message : chat.messages) {
      if (std::ranges::find(kRoles, message.role) != std::end(kRoles)) continue;
      const auto text = source(!chat.tools.empty());
      const auto quoted = [&](char quote) { return text.find(quote + message.role + quote) != std::string_view::npos; };
      if (quoted('\'') || quoted('"')) continue;
      throw TemplateError(400,
                          message.field + ": got " + io::brief(message.role) +
                              ", expected system, user, assistant, tool, or a role that the chat template names",
                          message.field);
    }
  }

  // Returns the process's reply to a chat. after_reply: for the messages behind a reply.
  std::string request(const Chat& chat, bool after_reply) const {
    constexpr std::size_t kLongest = 16 << 20, kTimesRequest = 8;
    const auto context = context_json(chat);
    JsonText beginnings = JsonText::array();
    for (std::size_t i = 0; i < chat.messages.size(); ++i) {
      if (chat.messages[i].cached) beginnings.push_back(i + 1);
    }
    return workers_.ask(JsonText{{"context", context},
                                 {"after_reply", after_reply},
                                 {"continue_final", chat.continues_last},
                                 {"beginnings", beginnings},
                                 {"longest", kLongest + kTimesRequest * context.text().size()}}
                            .text());
  }

  // Returns the texts in a reply of the process. A text that there is not is empty.
  static std::vector<ChatText> texts_of(const std::string& reply) {
    const io::JsonDocument document(io::as_bytes(reply), "the process of chat templates");
    const nlohmann::json& json = document;
    if (json.contains("refused")) throw TemplateError(400, json["refused"].get<std::string>());
    std::vector<ChatText> texts;
    for (const auto& text : json.at("texts")) texts.push_back(text.is_null() ? ChatText() : text.get<ChatText>());
    return texts;
  }

  static std::string joined(const ChatText& text) {
    std::string all;
    for (const auto& piece : text) all += piece;
    return all;
  }

  const JinjaSource source_;
  mutable TemplateWorkers workers_;
  std::optional<std::string> end_turn_;
};

}  // namespace

std::optional<JinjaSource> find_jinja_template(const std::filesystem::path& model) {
  const bool is_file = io::is_gguf(model);
  if (const auto file = model / "chat_template.jinja"; !is_file && std::filesystem::exists(file)) {
    return read_jinja_template(file, model);
  }
  const auto config = is_file ? model : model / data::kTokenizerConfigFile;
  if (!std::filesystem::exists(config)) return std::nullopt;
  const auto content = is_file ? data::gguf_tokenizer_config(config.string()) : io::read_json(config);
  JinjaSource source{.file = config.string(),
                     .templates = read_field(io::Fields(content, io::refuse_in_file(config.string())))};
  if (source.templates.empty()) return std::nullopt;
  source.variables = variables_of(model);
  return source;
}

JinjaSource read_jinja_template(const std::filesystem::path& file, const std::filesystem::path& model) {
  return {.file = file.string(), .templates = {{kDefault, read_text(file)}}, .variables = variables_of(model)};
}

std::shared_ptr<const ChatTemplate> make_jinja_template(JinjaSource source, const std::vector<std::string>& special,
                                                        const WorkerLimits& limits) {
  try {
    return std::make_shared<JinjaTemplate>(std::move(source), special, limits);
  } catch (const NoJinja&) {
    return nullptr;
  }
}

}  // namespace efla::serve
