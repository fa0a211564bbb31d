// The web page in Debian's chromium, with an engine that follows a script: text streams, branches, and nothing comes
// from the network but the API.
#include "efla/serve/page/page.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "efla/serve/api/service.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/browser.h"

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

  ServePage() {
    ApiOptions options;
    options.model = "tale";
    options.chat = load_chat_template("plain");
    options.kv_bytes_per_token = 64;
    options.page = page_html();
    HttpOptions http;
    http.port = 0;
    service_ = std::make_unique<Service>(engine_, std::move(options), Keys(), http);
    thread_ = std::thread([this] { EXPECT_TRUE(service_->run(0ms, false)); });
  }
  ~ServePage() override {
    service_->stop(0ms);
    thread_.join();
  }

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
  static void expect_clean() {
    for (const auto& line : browser_->console()) ADD_FAILURE() << line.level << ": " << line.text;
    for (const auto& url : browser_->requests()) {
      EXPECT_TRUE(url.starts_with("http://127.0.0.1:") || url == "data:,") << url;
    }
  }

  FakeEngine engine_;
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
    if (const char* folder = std::getenv("EFLA_SCREENSHOTS")) {
      browser_->screenshot(std::string(folder) + "/page-" + std::to_string(view.width) + (view.dark ? "-dark" : "") +
                           ".png");
    }
    expect_clean();
  }
}

TEST_F(ServePage, ContinuesStoredStates) {
  open(kDesktop);
  go("Once ", 4);
  EXPECT_EQ(text(), "Once abcd");
  go("upon ", 3);
  EXPECT_EQ(text(), "Once abcdupon abc");
  EXPECT_EQ(engine_.last().prompt.size(), 5U);  // the state had the rest
  EXPECT_TRUE(engine_.last().disposable);
  EXPECT_EQ(browser_->evaluate("nodes[current].tokens"), 17);
  EXPECT_EQ(browser_->evaluate("document.getElementById('state-bytes').textContent"), "1.07 kB");
  EXPECT_EQ(browser_->evaluate("document.getElementById('kv-bytes').textContent"), "1.09 kB");
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
  EXPECT_EQ(engine_.last().session, "");
  EXPECT_EQ(engine_.last().prompt.size(), 8U);
  // What the page keeps is there after it is opened again.
  browser_->open(service_->address() + "/", kDesktop, "document.documentElement.dataset.ready === 'true'");
  EXPECT_EQ(text(), "Once ab!a");
  click("new");
  EXPECT_TRUE(soon("document.getElementById('text').textContent === ''"));
  for (int i = 0; i < 500 && engine_.stored() > 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(engine_.stored(), 0U);
}

TEST_F(ServePage, StreamsAndStops) {
  open(kDesktop);
  engine_.step = 10ms;
  set("input", "Once ");
  set("max_tokens", "4000");
  click("go");
  EXPECT_TRUE(soon("document.querySelectorAll('#text .piece').length > 3"));
  EXPECT_EQ(browser_->evaluate("running !== null"), true);
  click("stop");
  EXPECT_TRUE(soon("running === null"));
  for (int i = 0; i < 500 && engine_.cancelled == 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(engine_.cancelled, 1);
  engine_.step = 0ms;
  const auto before = text();
  go("", 2);  // what was written is still there, and is computed again
  EXPECT_TRUE(text().starts_with(before));
  EXPECT_EQ(text().size(), before.size() + 2);
}

TEST_F(ServePage, KeepsAReplyThatAReloadCuts) {
  open(kDesktop);
  engine_.step = 10ms;
  set("input", "Once ");
  set("max_tokens", "4000");
  set("seed", "0");
  click("go");
  EXPECT_TRUE(soon("document.querySelectorAll('#text .piece').length > 3"));
  browser_->open(service_->address() + "/", kDesktop, "document.documentElement.dataset.ready === 'true'");
  EXPECT_TRUE(text().starts_with("Once abc")) << text();
  engine_.step = 0ms;
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
  for (const auto& session : engine_.sessions()) engine_.erase(session.name);
  go("upon ", 1);
  EXPECT_EQ(text(), "Once abcdupon a");
  EXPECT_EQ(engine_.last().prompt.size(), 14U);
}

}  // namespace
}  // namespace efla::serve
