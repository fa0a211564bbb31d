// The web page in Debian's chromium, with an engine that follows a script: texts and chats stream and branch, and
// nothing comes from the network but the API.
#include "efla/serve/page/page.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "efla/serve/api/service.h"
#include "efla/serve/chat/jinja_template.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/browser.h"
#include "tests/support/special_tokens.h"

namespace efla::serve {
namespace {

using namespace std::chrono_literals;
using test::Browser;
using test::View;

constexpr View kDesktop{.width = 1280, .height = 900, .dark = false},
    kDesktopDark{.width = 1280, .height = 900, .dark = true}, kPhone{.width = 390, .height = 844, .dark = false},
    kPhoneDark{.width = 390, .height = 844, .dark = true};

class ServePage : public testing::Test {
 protected:
  static void SetUpTestSuite() { browser_ = std::make_unique<Browser>(); }
  static void TearDownTestSuite() { browser_.reset(); }

  void SetUp() override { start(); }
  // Starts a server whose engine writes a script.
  void start(const std::string& script = "abcdefghij",
             std::shared_ptr<const ChatTemplate> chat = load_chat_template("plain"),
             std::unique_ptr<data::Tokenizer> tokenizer = data::load_tokenizer("bytes")) {
    ApiOptions options;
    options.model = "tale";
    options.chat = std::move(chat);
    options.kv_bytes_per_token = 64;
    options.page = web_page();
    HttpOptions http;
    http.port = 0;
    made_ = std::make_unique<FakeEngine>(script, std::move(tokenizer));
    service_ = std::make_unique<Service>(engine(), std::move(options), Keys(), http);
    thread_ = std::thread([this] { EXPECT_TRUE(service_->run(0ms, false)); });
  }
  void TearDown() override {
    if (!thread_.joinable()) return;
    service_->stop(0ms);
    thread_.join();
  }
  FakeEngine& engine() { return *made_; }

  void open(const View& view) {
    browser_->open(service_->address() + "/", view, "document.documentElement.dataset.ready === 'true'");
    browser_->evaluate("localStorage.clear(), forget()");
  }
  // Waits until an expression is true, for at most ten seconds.
  static bool soon(const std::string& expression) {
    for (int i = 0; i < 500; ++i) {
      if (browser_->evaluate(expression) == true) return true;
      std::this_thread::sleep_for(20ms);
    }
    return false;
  }
  static std::string text() { return browser_->evaluate("document.getElementById('text').textContent"); }
  static void click(const std::string& id) { browser_->evaluate("document.getElementById('" + id + "').click()"); }
  static void set(const std::string& id, const std::string& value) {
    browser_->evaluate("document.getElementById('" + id + "').value = '" + value + "'");
  }
  // Continues the text by a number of tokens, after a text of the user.
  static void go(const std::string& own, int tokens) {
    set("input", own);
    set("max_tokens", std::to_string(tokens));
    set("seed", "0");
    click("go");
    ASSERT_TRUE(soon("running === null"));
    ASSERT_EQ(browser_->evaluate("document.getElementById('error').textContent"), "");
  }
  // Saves a picture of the page where the environment names a folder.
  static void screenshot(const std::string& name, const View& view) {
    const char* folder = std::getenv("EFLA_SCREENSHOTS");
    if (folder == nullptr) return;
    browser_->screenshot(std::string(folder) + "/" + name + "-" + std::to_string(view.width) +
                         (view.dark ? "-dark" : "") + ".png");
  }
  static void expect_clean() {
    for (const auto& line : browser_->console()) ADD_FAILURE() << line.level << ": " << line.text;
    for (const auto& url : browser_->requests()) {
      EXPECT_TRUE(url.starts_with("http://127.0.0.1:") || url == "data:,") << url;
    }
  }

  std::unique_ptr<FakeEngine> made_;
  std::unique_ptr<Service> service_;
  std::thread thread_;
  static std::unique_ptr<Browser> browser_;
};
std::unique_ptr<Browser> ServePage::browser_;

TEST_F(ServePage, FitsEveryWidthAndTheme) {
  for (const auto& view : {kDesktop, kDesktopDark, kPhone, kPhoneDark}) {
    SCOPED_TRACE(std::to_string(view.width) + (view.dark ? " dark" : " light"));
    open(view);
    go("Once upon a time ", 40);
    EXPECT_LE(browser_->evaluate("document.documentElement.scrollWidth"), view.width);
    EXPECT_EQ(browser_->evaluate("getComputedStyle(document.body).backgroundColor"),
              view.dark ? "rgb(20, 24, 29)" : "rgb(255, 255, 255)");
    // WCAG 2: 4.5 for text.
    const auto contrasts = browser_->evaluate(R"((() => {
      const style = getComputedStyle(document.documentElement);
      const luminance = (name) => {
        const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
        const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return [["--text", "--page"], ["--quiet", "--page"], ["--text", "--own"], ["--on-accent", "--accent"],
              ["--warn", "--page"], ["--text", "--wash"]].map((pair) => {
        const [low, high] = pair.map(luminance).sort((a, b) => a - b);
        return { pair: pair.join(" on "), contrast: (high + 0.05) / (low + 0.05) };
      });
    })())");
    ASSERT_EQ(contrasts.size(), 6U);
    for (const auto& pair : contrasts) EXPECT_GE(pair["contrast"], 4.5) << pair;
    screenshot("page", view);
    expect_clean();
  }
}

TEST_F(ServePage, ContinuesStoredStates) {
  open(kDesktop);
  go("Once ", 4);
  EXPECT_EQ(text(), "Once abcd");
  go("upon ", 3);
  EXPECT_EQ(text(), "Once abcdupon abc");
  EXPECT_EQ(engine().last().prompt.size(), 5U);  // the state had the rest
  EXPECT_TRUE(engine().last().disposable);
  EXPECT_EQ(browser_->evaluate("nodes[current].tokens"), 17);
  EXPECT_EQ(browser_->evaluate("document.getElementById('state-bytes').textContent"), "1.07 kB");
  EXPECT_EQ(browser_->evaluate("document.getElementById('kv-bytes').textContent"), "1.09 kB");
  EXPECT_EQ(browser_->evaluate("document.getElementById('parts').textContent"),
            "constant part 1.00 kB, pages of keys and values 68 bytes");
  expect_clean();
}

TEST_F(ServePage, BranchesAndReturns) {
  open(kDesktop);
  go("Once ", 4);
  go("upon ", 3);
  browser_->evaluate("document.querySelectorAll('#tree button')[0].click()");
  EXPECT_EQ(text(), "Once abcd");
  go("or ", 2);
  EXPECT_EQ(text(), "Once abcdor ab");
  EXPECT_EQ(browser_->evaluate("document.querySelectorAll('#tree li').length"), 3);
  click("again");
  ASSERT_TRUE(soon("running === null"));
  EXPECT_EQ(browser_->evaluate("document.querySelectorAll('#tree li').length"), 4);
  // Behind the second word of the first reply.
  browser_->evaluate("document.querySelectorAll('#text .piece')[1].click()");
  EXPECT_EQ(text(), "Once ab");
  go("!", 1);
  EXPECT_EQ(text(), "Once ab!a");
  EXPECT_EQ(engine().last().session, "");
  EXPECT_EQ(engine().last().prompt.size(), 8U);
  // What the page keeps is there after it is opened again.
  browser_->open(service_->address() + "/", kDesktop, "document.documentElement.dataset.ready === 'true'");
  EXPECT_EQ(text(), "Once ab!a");
  click("new");
  EXPECT_TRUE(soon("document.getElementById('text').textContent === ''"));
  for (int i = 0; i < 500 && engine().stored() > 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(engine().stored(), 0U);
}

TEST_F(ServePage, StreamsAndStops) {
  open(kDesktop);
  engine().step = 10ms;
  set("input", "Once ");
  set("max_tokens", "4000");
  click("go");
  EXPECT_TRUE(soon("document.querySelectorAll('#text .piece').length > 3"));
  EXPECT_EQ(browser_->evaluate("running !== null"), true);
  click("stop");
  EXPECT_TRUE(soon("running === null"));
  for (int i = 0; i < 500 && engine().cancelled == 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(engine().cancelled, 1);
  engine().step = 0ms;
  const auto before = text();
  go("", 2);  // what was written is still there, and is computed again
  EXPECT_TRUE(text().starts_with(before));
  EXPECT_EQ(text().size(), before.size() + 2);
}

TEST_F(ServePage, KeepsAReplyThatAReloadCuts) {
  open(kDesktop);
  engine().step = 10ms;
  set("input", "Once ");
  set("max_tokens", "4000");
  set("seed", "0");
  click("go");
  EXPECT_TRUE(soon("document.querySelectorAll('#text .piece').length > 3"));
  browser_->open(service_->address() + "/", kDesktop, "document.documentElement.dataset.ready === 'true'");
  EXPECT_TRUE(text().starts_with("Once abc")) << text();
  engine().step = 0ms;
  const auto before = text();
  go("", 2);  // continues what the page has kept
  EXPECT_TRUE(text().starts_with(before));
  EXPECT_EQ(text().size(), before.size() + 2);
}

TEST_F(ServePage, SaysWhatIsWrong) {
  open(kDesktop);
  set("temperature", "-1");
  set("input", "Once ");
  browser_->evaluate("document.getElementById('composer').noValidate = true");
  click("go");
  EXPECT_TRUE(soon("document.getElementById('error').textContent.includes('temperature')"));
  EXPECT_EQ(browser_->evaluate("document.getElementById('input').value"), "Once ");
}

TEST_F(ServePage, ComputesAgainWhatTheServerForgot) {
  open(kDesktop);
  go("Once ", 4);
  for (const auto& session : engine().sessions()) engine().erase(session.name);
  go("upon ", 1);
  EXPECT_EQ(text(), "Once abcdupon a");
  EXPECT_EQ(engine().last().prompt.size(), 14U);
}

// A chat with reasoning and tools.
class ServeChatPage : public ServePage {
 protected:
  void SetUp() override {}
  // Starts a server with a template in Jinja. Returns false where jinja2 is missing.
  bool start_chat(const std::string& script, const std::string& chat_template) {
    auto chat = make_jinja_template({.file = "t.jinja", .templates = {{"default", chat_template}}},
                                    {"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
    if (chat == nullptr) return false;
    start(script, std::move(chat), test::tokenizer_with_special_tokens());
    return true;
  }
  static std::vector<std::string> texts(const std::string& selector) {
    return browser_->evaluate("[...document.querySelectorAll('" + selector + "')].map((one) => one.textContent)");
  }
  std::string prompt() { return engine().info().tokenizer->decode(engine().last().prompt); }
};

constexpr const char* kTalk =
    "{{ tools | tojson if tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    "{# </think><tool_call><function= #}";
constexpr const char* kCall =
    "The user asks for the weather.\n</think>\n\nI look.\n\n<tool_call>\n<function=get>\n<parameter=city>\nZug\n"
    "</parameter>\n</function>\n</tool_call>$";

TEST_F(ServeChatPage, ShowsReasoningAndCallsAndSendsResults) {
  if (!start_chat(kCall, kTalk)) GTEST_SKIP() << "python3 or jinja2 is missing";
  for (const auto& view : {kDesktop, kDesktopDark, kPhone}) {
    SCOPED_TRACE(std::to_string(view.width) + (view.dark ? " dark" : " light"));
    open(view);
    EXPECT_EQ(browser_->evaluate("view"), "chat");  // a model with a template of its own
    set("system", "Be brief.");
    set("tools", R"([{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}])");
    go("How is the weather?", 400);
    EXPECT_EQ(texts("#chat h3"), (std::vector<std::string>{"system", "user", "assistant"}));
    EXPECT_EQ(texts("#chat .reasoning .content"), std::vector<std::string>{"The user asks for the weather."});
    EXPECT_EQ(browser_->evaluate("document.querySelector('#chat details').open"), false);
    EXPECT_EQ(texts("#chat .assistant > .content"), std::vector<std::string>{"I look."});
    EXPECT_EQ(texts("#chat .call b"), std::vector<std::string>{"get"});
    EXPECT_EQ(texts("#chat .call pre"), std::vector<std::string>{"{\n  \"city\": \"Zug\"\n}"});
    screenshot("call", view);
    browser_->evaluate("document.querySelector('#chat .result').value = 'rain'");
    go("", 400);
    EXPECT_EQ(prompt(),
              "tool\nrain\nassistant\n<think>\n");  // the state has the rest; decode() leaves special tokens out
    EXPECT_EQ(texts("#chat .tool .content"), std::vector<std::string>{"rain"});
    EXPECT_EQ(texts("#tree button"), (std::vector<std::string>{"How is the weather? – I look.", "rain – I look."}));
    EXPECT_LE(browser_->evaluate("document.documentElement.scrollWidth"), view.width);
    browser_->evaluate("document.querySelector('#chat details').open = true");
    screenshot("chat", view);
    expect_clean();
  }
}

TEST_F(ServeChatPage, BranchesAndKeepsBothViews) {
  if (!start_chat("Hello</think>$", "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}")) {
    GTEST_SKIP() << "python3 or jinja2 is missing";
  }
  open(kDesktop);
  go("one", 5);
  go("two", 5);
  click("again");
  ASSERT_TRUE(soon("running === null"));
  EXPECT_EQ(texts("#tree button").size(), 3U);
  browser_->evaluate("document.querySelectorAll('#tree button')[0].click()");
  EXPECT_EQ(texts("#chat .user .content"), std::vector<std::string>{"one"});
  go("three", 5);
  EXPECT_EQ(texts("#chat .user .content"), (std::vector<std::string>{"one", "three"}));
  EXPECT_EQ(prompt(), "[user three]");
  click("view-text");
  EXPECT_EQ(text(), "");
  go("Once ", 4);
  EXPECT_EQ(text(), "Once Hell");
  browser_->open(service_->address() + "/", kDesktop, "document.documentElement.dataset.ready === 'true'");
  EXPECT_EQ(text(), "Once Hell");
  click("view-chat");
  EXPECT_EQ(texts("#chat .user .content"), (std::vector<std::string>{"one", "three"}));
  expect_clean();
}

TEST_F(ServeChatPage, SendsTheWholeChatWhereItsStateCannotBeContinued) {
  // Writes a reply differently once messages follow.
  const std::string rewrites =
      "{% for m in messages %}[{{ m.role }} {{ m.content }}{{ '!' if not loop.last }}]{% endfor %}";
  if (!start_chat("Hello", rewrites)) GTEST_SKIP() << "python3 or jinja2 is missing";
  open(kDesktop);
  go("one", 5);
  go("two", 5);
  EXPECT_EQ(prompt(), "[user one!][assistant Hello!][user two]");
  set("tools", "[");
  set("input", "three");
  click("go");
  EXPECT_TRUE(soon("document.getElementById('error').textContent.includes('JSON')"));
  EXPECT_EQ(browser_->evaluate("document.getElementById('input').value"), "three");
}

}  // namespace
}  // namespace efla::serve
