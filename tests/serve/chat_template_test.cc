// Chat templates without a server: with a text per role, and in Jinja.
#include "efla/serve/chat/chat_template.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "efla/serve/chat/jinja_template.h"
#include "efla/serve/chat/json_slices.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

using namespace std::chrono_literals;
using Messages = std::vector<ChatMessage>;

std::string joined(const ChatText& text) {
  std::string all;
  for (const auto& piece : text) all += piece;
  return all;
}

std::string rendered(const ChatTemplate& chat_template, const Messages& messages) {
  return joined(chat_template.render({.messages = messages}).text);
}

TEST(RoleTemplates, PlainChatmlAndFiles) {
  const Messages chat{{"system", "S"}, {"user", "a{content}"}, {"assistant", "b"}, {"user", "c"}};
  EXPECT_EQ(rendered(*load_chat_template("plain"), chat), "S\n\nUser: a{content}\nAssistant: b\nUser: c\nAssistant:");
  EXPECT_EQ(rendered(*load_chat_template("chatml"), {{"user", "a"}}),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(load_chat_template("chatml")->end_turn(), "<|im_end|>\n");
  EXPECT_THROW(rendered(*load_chat_template("plain"), {{"robot", "a"}}), TemplateError);
  for (const std::string name : {"plain", "chatml"}) {
    const auto made = load_chat_template(name);
    const std::string begins = name == "plain" ? "Assistant:" : "<|im_start|>assistant\n";
    for (const std::string reply : {" b", "  b ", " ", "\tb"}) {
      if (name == "plain" && !reply.starts_with(' ')) continue;  // then the template adds the blank
      const auto stored = rendered(*made, {{"user", "a"}}) + reply + *made->end_turn();
      EXPECT_EQ(rendered(*made, {{"user", "a"}, {"assistant", reply}}), stored + begins) << reply;
    }
  }
  const test::TempFolder folder;
  const auto with = [&](const std::string& text) {
    return load_chat_template(test::write_text(folder / "t.toml", text).string());
  };
  const auto own = with("user = \"Q {content}\\n\"\nassistant = \"A {content}\\n\"\nreply = \"A \"\nstop = [\"Q\"]\n");
  EXPECT_EQ(rendered(*own, {{"user", "x"}}), "Q x\nA ");
  EXPECT_EQ(own->stop(), std::vector<std::string>{"Q"});
  EXPECT_EQ(rendered(*own, {{"assistant", " x"}}), "A  x\nA ");  // the template has the reply's blank in "reply"
  const auto blank = with("user = \"{content}\"\nassistant = \"A:\\n {content}\\n\"\nreply = \"A:\"\n");
  EXPECT_EQ(rendered(*blank, {{"assistant", "\n x"}}), "A:\n x\nA:");
  EXPECT_EQ(rendered(*blank, {{"assistant", " x"}}), "A:\n  x\nA:");
  const auto refused = [&](const std::string& text, const std::string& says) {
    test::expect_bad_content([&] { with(text); }, -1, "t.toml: " + says);
  };
  refused("user = \"Q\"\nassistant = \"{content}\"", "user: got \"Q\", expected a text with {content}");
  refused("user = \"{content}\"", "assistant: got nothing, expected a text with {content}");
  refused("stop = 3", "stop: got 3, expected a list of texts");
  refused("stop = [\"\"]", "stop: got [\"\"], expected texts of at least one character");
  refused("user = 3", "user: got 3, expected a text");
}

TEST(RoleTemplates, KeepAClientsSpecialTokensApart) {
  const auto made = load_chat_template("chatml", {"<|im_end|>", "<|im_end|>>"});
  const auto text = made->render({.messages = {{"user", "a<|im_end|>>b<|im_end|>"}}}).text;
  EXPECT_EQ(text,
            (ChatText{"<|im_start|>user\na", "<|im_end|>>", "b", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"}));
  Chat chat{.messages = {{"user", "a"}, {"assistant", "b"}}, .begins_reply = false};
  EXPECT_TRUE(joined(made->render(chat).text).ends_with("b<|im_end|>\n"));
  chat.continues_last = true;
  EXPECT_TRUE(joined(made->render(chat).text).ends_with("assistant\nb"));
  chat.messages[0].cached = true;
  EXPECT_EQ(made->render(chat).beginnings, std::vector<ChatText>{{"<|im_start|>user\na<|im_end|>\n"}});
}

constexpr const char* kTemplate =
    "{%- if messages[0].role != 'system' and need_system %}{{ raise_exception('No system message.') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}<end>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}";

class JinjaTemplates : public testing::Test {
 protected:
  void SetUp() override {
    if (make(kTemplate) == nullptr) GTEST_SKIP() << "python3 or jinja2 is missing";
  }
  static std::shared_ptr<const ChatTemplate> make(const std::string& text, const std::vector<std::string>& special = {},
                                                  const WorkerLimits& limits = {}) {
    return make_jinja_template(
        {.file = "t.jinja", .templates = {{"default", text}}, .variables = {{"bos_token", "<s>"}}}, special, limits);
  }
  static void expect_refused(const ChatTemplate& made, const Chat& chat, int status, const std::string& says) {
    try {
      made.render(chat);
      ADD_FAILURE() << "not refused";
    } catch (const TemplateError& error) {
      EXPECT_EQ(error.status, status);
      EXPECT_NE(error.message.find(says), std::string::npos) << error.message;
    }
  }
};

TEST_F(JinjaTemplates, RenderMessagesToolsAndVariables) {
  const auto made = make(kTemplate);
  EXPECT_EQ(rendered(*made, {{"user", " a\xc3\xa9 "}}), "<s><user>a\xc3\xa9<end>\n<assistant>");
  EXPECT_EQ(made->end_turn(), "<end>\n");
  EXPECT_TRUE(made->writes_bos());
  Chat chat{.messages = {{"user", "a"}}, .tools = R"([{"b": 1.0, "a": "<é"}])", .begins_reply = false};
  EXPECT_EQ(joined(made->render(chat).text), "<s><user>a<end>\n[{\"b\": 1.0, \"a\": \"<é\"}]");
  chat = {.messages = {{"user", "a"}}, .variables = R"({"need_system": true, "bos_token": "B"})"};
  expect_refused(*made, chat, 400, "No system message.");
  chat.messages.insert(chat.messages.begin(), {"system", "s"});
  EXPECT_TRUE(joined(made->render(chat).text).starts_with("B<system>s<end>"));
  expect_refused(*made, {.messages = {{.role = "end", .content = "a", .field = "messages[0].role"}}}, 400,
                 "messages[0].role: got \"end\", expected system, user, assistant, tool, or");
  expect_refused(*make("{{ messages[0].content + 1 }}"), {.messages = {{"user", "a"}}}, 400, "TypeError");
  expect_refused(*make("{{ nothing.at.all }}"), {.messages = {{"user", "a"}}}, 400, "'nothing' is undefined");
}

TEST_F(JinjaTemplates, KeepAClientsSpecialTokensApart) {
  const auto made = make(kTemplate, {"<end>", "<s>", "<user>"});
  const auto text = made->render({.messages = {{"user", "x<end>y<s>"}, {"user", "\U000F0000\\U000f0001 <end>"}}}).text;
  EXPECT_EQ(text, (ChatText{"<s><user>x", "<end>", "y", "<s>", "<end>\n<user>\U000F0000\\U000f0001 ", "<end>",
                            "<end>\n<assistant>"}));
  // In JSON of ASCII, in a dictionary as Python writes it, and in names.
  const auto json = make("{{ tools }}{{ tools | tojson(ensure_ascii=true) }}", {"<end>"});
  const auto tools = json->render({.messages = {{"user", "a"}}, .tools = R"([{"\u003cend>": "<end>"}])"}).text;
  EXPECT_EQ(tools, (ChatText{"[{'", "<end>", "': '", "<end>", "'}][{\"", "<end>", "\": \"", "<end>", "\"}]"}));
}

TEST_F(JinjaTemplates, ContinueAReply) {
  const auto made = make(kTemplate, {"<end>"});
  EXPECT_EQ(made->continuation({.messages = {{"user", "a<end>"}}}),
            (ChatText{"<user>a", "<end>", "<end>\n<assistant>"}));
  // Another end where messages follow, and a reply that is not shown as it is.
  for (const char* text : {"{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ',' }}{% endfor %}",
                           "{% for m in messages %}{{ m.content | length }}{% endfor %}"}) {
    const auto other = make(text);
    EXPECT_THROW(other->continuation({.messages = {{"user", "a"}}}), TemplateError) << text;
  }
  Chat last{.messages = {{"user", "a"}, {"assistant", "b "}}, .continues_last = true};
  EXPECT_EQ(joined(made->render(last).text), "<s><user>a<end>\n<assistant>b ");
  EXPECT_EQ(joined(made->continuation(last)), "<user>a<end>\n<assistant>b ");
  last = {.messages = {{"system", "s", true}, {"user", "a", true}, {"user", "b"}}};
  const auto rendered = made->render(last);
  ASSERT_EQ(rendered.beginnings.size(), 2U);
  EXPECT_EQ(joined(rendered.beginnings[1]), "<s><system>s<end>\n<user>a<end>\n");
}

TEST_F(JinjaTemplates, ABeginningMayLackTheUsersMessage) {
  const auto made = make(
      "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('no user') "
      "}}{% endif %}"
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
  const Chat chat{.messages = {{"system", "s", true}, {"user", "a"}}};
  EXPECT_EQ(made->render(chat).beginnings, std::vector<ChatText>{{"<system>s<user>"}});
}

TEST_F(JinjaTemplates, AreBoundedInTimeMemoryAndLength) {
  WorkerLimits limits;
  limits.time = 300ms;
  limits.memory = std::size_t{512} << 20;
  const std::string loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
  const auto with = [&](const std::string& text) {
    return make("{% if messages[0].content == 'x' %}" + text + "{% endif %}ok", {}, limits);
  };
  const Chat bad{.messages = {{"user", "x"}}}, good{.messages = {{"user", "y"}}};
  struct Case {
    std::string text;
    int status;
    std::string says;
  };
  for (const auto& [text, status, says] :
       std::vector<Case>{{loop, 400, "takes too long"},
                         {"{{ 'a' * 1000000000 }}", 400, "memory"},
                         {"{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}", 400, "more than 167"},
                         {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", 400, "calls itself too often"},
                         {"{{ ''.__class__.__mro__ }}", 400, "unsafe"},
                         {"{{ messages.append(1) }}", 400, "unsafe"},
                         {"{{ namespace(_a=1) }}", 400, "_a"}}) {
    SCOPED_TRACE(text);
    const auto made = with(text);
    ASSERT_NE(made, nullptr);
    expect_refused(*made, bad, status, says);
    EXPECT_EQ(joined(made->render(good).text), "ok");
  }
  // The reply of the process takes six times the memory of this text.
  const auto made = with("{{ '\\x01' * n }}");
  expect_refused(*made,
                 {.messages = {{"user", "x"}, {"user", std::string(6 << 20, 'a')}}, .variables = R"({"n": 60000000})"},
                 400, "memory");
  EXPECT_EQ(joined(made->render(good).text), "ok");
}

// Returns the numbers of the processes that this one has started.
std::vector<pid_t> children() {
  std::vector<pid_t> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    std::getline(file, line);
    const auto name = line.rfind(')');
    if (name == std::string::npos) continue;
    char state = 0;
    int parent = 0;
    std::istringstream(line.substr(name + 1)) >> state >> parent;
    if (parent == getpid()) all.push_back(std::stoi(entry.path().filename()));
  }
  return all;
}

TEST_F(JinjaTemplates, OutliveTheirProcessesAndLeaveNone) {
  const auto before = children().size();
  {
    const auto made = make(kTemplate);
    ASSERT_EQ(children().size(), before + 1);
    for (int i = 0; i < 2; ++i) {
      kill(children().back(), SIGKILL);
      EXPECT_EQ(rendered(*made, {{"user", "a"}}), "<s><user>a<end>\n<assistant>");
    }
    kill(children().back(), SIGKILL);  // it leaves no zombie, also where no chat follows
    const auto late = std::chrono::steady_clock::now() + 10s;
    while (children().size() > before && std::chrono::steady_clock::now() < late) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(children().size(), before);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 20; ++i) EXPECT_TRUE(rendered(*made, {{"user", "a"}}).ends_with("<assistant>"));
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_LE(children().size(), before + 4);
    // The process has no file of this one.
    const auto files = std::filesystem::path("/proc") / std::to_string(children().back()) / "fd";
    for (const auto& file : std::filesystem::directory_iterator(files)) EXPECT_LE(std::stoi(file.path().filename()), 3);
  }
  EXPECT_EQ(children().size(), before);
}

TEST_F(JinjaTemplates, AreFoundInAModelsFolder) {
  const test::TempFolder folder;
  EXPECT_FALSE(find_jinja_template(folder.path()));
  test::write_text(folder / "tokenizer_config.json", R"({"eos_token": {"content": "</s>"}, "chat_template": [
      {"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t"}]})");
  auto source = find_jinja_template(folder.path());
  ASSERT_TRUE(source);
  const auto named = make_jinja_template(*source, {});
  EXPECT_EQ(rendered(*named, {{"user", "a"}}), "d</s>");
  EXPECT_EQ(joined(named->render({.messages = {{"user", "a"}}, .tools = "[{}]"}).text), "t");
  test::write_text(folder / "chat_template.jinja", "file\n");
  source = find_jinja_template(folder.path());
  EXPECT_EQ(rendered(*make_jinja_template(*source, {}), {{"user", "a"}}), "file");
  test::write_text(folder / "chat_template.jinja", "{% for %}");
  test::expect_bad_content([&] { make_jinja_template(*find_jinja_template(folder.path()), {}); }, -1,
                           "not a chat template: line 1: ");
  test::write_text(folder / "chat_template.jinja", "{{ 'a' * 1000000000 }}{% set b = 'a' * 1000000000 %}");
  test::expect_bad_content([&] { make_jinja_template(*find_jinja_template(folder.path()), {}); }, -1,
                           "not a chat template: MemoryError");
  std::filesystem::remove(folder / "chat_template.jinja");
  test::write_text(folder / "tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "d"}]})");
  test::expect_bad_content([&] { find_jinja_template(folder.path()); }, -1, "of which one has the name \"default\"");
}

TEST(JinjaSources, AreFoundInAGgufFile) {
  const test::TempFolder folder;
  const std::vector<std::string> tokens{"a", "</s>"};
  test::GgufBytes file;
  file.texts("tokenizer.ggml.tokens", tokens).integer("tokenizer.ggml.eos_token_id", 1);
  EXPECT_FALSE(find_jinja_template(test::write_text(folder / "m.gguf", file.bytes())));
  file.text("tokenizer.chat_template", "of the file");
  const auto path = test::write_text(folder / "m.gguf", file.bytes());
  const auto source = find_jinja_template(path);
  ASSERT_TRUE(source);
  EXPECT_EQ(source->templates.at("default"), "of the file");
  const std::map<std::string, std::string> variables{{"eos_token", "</s>"}};
  EXPECT_EQ(source->variables, variables);
  EXPECT_EQ(read_jinja_template(test::write_text(folder / "t.jinja", "t"), path).variables, variables);
}

TEST(JsonSlices, KeepWhatWasWritten) {
  const std::string text = R"( {"b" : 1.0, "a\u0062": [ {"x": "]\"}"}, 2 ], "c": "x)";
  const auto members = json_members(text);
  ASSERT_EQ(members.size(), 3U);
  EXPECT_EQ(members[0].value, "1.0");
  EXPECT_EQ(members[1].name, "ab");
  EXPECT_EQ(members[1].value, R"([ {"x": "]\"}"}, 2 ])");
  EXPECT_FALSE(members[2].whole);
  EXPECT_EQ(json_member("\xEF\xBB\xBF{\"a\": 1}", "a"), "1");
  EXPECT_EQ(json_elements(members[1].value), (std::vector<std::string_view>{R"({"x": "]\"}"})", "2"}));
  EXPECT_TRUE(is_json_object(R"( {"a": [1]} )"));
  for (const char* other : {"", "{", "[1]", "{} {}", "{\"a\": }", "3"}) EXPECT_FALSE(is_json_object(other)) << other;
  EXPECT_FALSE(is_json_object(std::string("{}\0x", 4)));
  EXPECT_FALSE(is_json_object(R"({"a": )" + std::string(256, '[') + std::string(256, ']') + "}"));
}

}  // namespace
}  // namespace efla::serve
