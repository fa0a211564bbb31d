#include "tests/support/browser.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

namespace efla::test {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kPatience{30};

std::runtime_error failure(const std::string& what) { return std::runtime_error("chromium: " + what); }

std::string base64_decoded(std::string_view text) {
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  unsigned bits = 0;
  int count = 0;
  for (const char c : text) {
    const auto value = kAlphabet.find(c);
    if (value == std::string_view::npos) break;  // the padding
    bits = bits << 6 | static_cast<unsigned>(value);
    count += 6;
    if (count >= 8) out += static_cast<char>(bits >> (count -= 8) & 0xff);
  }
  return out;
}

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw failure("no pipe");
  return ends;
}

// Returns the text that the page printed, from the arguments of a console call.
std::string console_text(const json& arguments) {
  std::string out;
  for (const auto& argument : arguments) {
    if (!out.empty()) out += ' ';
    const auto value = argument.find("value");
    out += value == argument.end() ? argument.value("description", argument.value("type", ""))
           : value->is_string()    ? value->get<std::string>()
                                   : value->dump();
  }
  return out;
}

}  // namespace

Browser::Browser() {
  profile_ = (std::filesystem::temp_directory_path() / "efla-browser-XXXXXX").string();
  if (!mkdtemp(profile_.data())) throw failure("no temporary folder");
  signal(SIGPIPE, SIG_IGN);  // a write to a browser that ended then fails instead of ending the test
  auto commands = make_pipe(), replies = make_pipe();
  // Chromium expects the descriptors 3 and 4. The pipes are moved out of the way first.
  commands[0] = fcntl(commands[0], F_DUPFD_CLOEXEC, 10);
  replies[1] = fcntl(replies[1], F_DUPFD_CLOEXEC, 10);
  to_ = commands[1];
  from_ = replies[0];
  start(commands[0], replies[1]);
  close(commands[0]);
  close(replies[1]);
  try {
    call("Browser.getVersion");
  } catch (const std::runtime_error&) {
    stop();
    throw failure("did not start; it comes with the Debian package chromium (scripts/install-deps installs it)");
  }
}

void Browser::start(int commands, int replies) {
  const std::string profile = "--user-data-dir=" + profile_;
  process_ = fork();
  if (process_ < 0) throw failure("no process");
  if (process_ > 0) return;
  setpgid(0, 0);
  dup2(commands, 3);
  dup2(replies, 4);
  const int nowhere = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) dup2(nowhere, fd);
  // --no-sandbox, because tests may run as root in containers without user namespaces. The pages are our own.
  execlp("chromium", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
         "--remote-debugging-pipe", profile.c_str(), "about:blank", nullptr);
  _exit(127);
}

Browser::~Browser() { stop(); }

void Browser::stop() {
  close(to_);  // makes chromium quit
  close(from_);
  for (int i = 0; i < 100 && waitpid(process_, nullptr, WNOHANG) == 0; ++i) {
    if (i == 99) {
      kill(-process_, SIGKILL);
      waitpid(process_, nullptr, 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::error_code ignored;
  std::filesystem::remove_all(profile_, ignored);
}

void Browser::open(const std::string& path, const View& view, const std::string& ready) {
  if (!target_.empty()) {
    session_.clear();
    call("Target.closeTarget", {{"targetId", target_}});
  }
  console_.clear();
  requests_.clear();
  target_ = call("Target.createTarget", {{"url", "about:blank"}})["targetId"];
  session_ = call("Target.attachToTarget", {{"targetId", target_}, {"flatten", true}})["sessionId"];
  for (const char* domain : {"Page", "Runtime", "Log", "Network"}) call(std::string(domain) + ".enable");
  // Emulates a phone below 600 px, because headless windows are never narrower than 500 px.
  call("Emulation.setDeviceMetricsOverride",
       {{"width", view.width}, {"height", view.height}, {"deviceScaleFactor", 1}, {"mobile", view.width < 600}});
  call("Emulation.setEmulatedMedia",
       {{"features", {{{"name", "prefers-color-scheme"}, {"value", view.dark ? "dark" : "light"}}}}});
  const bool web = path.starts_with("http://");
  call("Page.navigate", {{"url", web ? path : "file://" + std::filesystem::absolute(path).string()}});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const std::string protocol = web ? "http:" : "file:";
  while (evaluate("Boolean(location.protocol === '" + protocol + "' && document.readyState === 'complete' && (" +
                  ready + "))") != true) {
    if (std::chrono::steady_clock::now() > deadline) throw failure(path + " was never ready: " + ready);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

json Browser::evaluate(const std::string& expression) {
  const auto reply =
      call("Runtime.evaluate", {{"expression", expression}, {"returnByValue", true}, {"awaitPromise", true}});
  if (reply.contains("exceptionDetails")) throw failure(expression + ": " + reply["exceptionDetails"].dump());
  return reply["result"].value("value", json());
}

std::string Browser::dom() { return evaluate("document.documentElement.outerHTML").get<std::string>(); }

void Browser::screenshot(const std::string& path) {
  const auto reply = call("Page.captureScreenshot", {{"format", "png"}, {"captureBeyondViewport", true}});
  std::ofstream out(path, std::ios::binary);
  out << base64_decoded(reply["data"].get_ref<const std::string&>());
  if (!out.flush()) throw failure("cannot write " + path);
}

json Browser::call(const std::string& method, json params) {
  json message{{"id", ++last_id_}, {"method", method}, {"params", std::move(params)}};
  if (!session_.empty()) message["sessionId"] = session_;
  const auto text = message.dump() + '\0';
  for (std::size_t sent = 0; sent < text.size();) {
    const auto n = write(to_, text.data() + sent, text.size() - sent);
    if (n <= 0) throw failure("ended before " + method);
    sent += static_cast<std::size_t>(n);
  }
  while (true) {
    const auto reply = receive();
    if (!reply.contains("id")) {
      handle(reply);
    } else if (reply["id"] == last_id_) {
      if (reply.contains("error")) throw failure(method + ": " + reply["error"].dump());
      return reply["result"];
    }
  }
}

void Browser::handle(const json& event) {
  if (session_.empty() || event.value("sessionId", "") != session_) return;
  const auto& params = event["params"];
  if (event["method"] == "Runtime.consoleAPICalled") {
    console_.push_back({params["type"], console_text(params["args"])});
  } else if (event["method"] == "Runtime.exceptionThrown") {
    console_.push_back({"error", params["exceptionDetails"].dump()});
  } else if (event["method"] == "Log.entryAdded") {
    console_.push_back({params["entry"]["level"], params["entry"]["text"]});
  } else if (event["method"] == "Network.requestWillBeSent") {
    requests_.push_back(params["request"]["url"]);
  }
}

json Browser::receive() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    if (const auto end = buffer_.find('\0'); end != std::string::npos) {
      const auto message = json::parse(buffer_.substr(0, end));
      buffer_.erase(0, end + 1);
      return message;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd waiting{from_, POLLIN, 0};
    if (left <= 0 || poll(&waiting, 1, static_cast<int>(left)) <= 0) throw failure("no answer for 30 seconds");
    std::array<char, 65536> chunk{};
    const auto n = read(from_, chunk.data(), chunk.size());
    if (n <= 0) throw failure("ended");
    buffer_.append(chunk.data(), static_cast<std::size_t>(n));
  }
}

}  // namespace efla::test
