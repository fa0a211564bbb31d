// efla serve as a user meets it: the address, requests, the end, sessions of the next start, and mistakes.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "efla/nn/models/language_model_file.h"
#include "tests/engine/tiny_model.h"
#include "tests/support/http_client.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

class ServeCommand : public testing::Test {
 protected:
  ServeCommand() {
    std::filesystem::create_directory(model());
    nn::save_language_model(tiny_model(), model());
  }
  ~ServeCommand() override {
    if (process_ > 0) {
      kill(process_, SIGKILL);
      wait_for(process_);
    }
  }

  std::string model() const { return folder.file("model"); }
  // The device is the CPU unless `more` says otherwise.
  Arguments words(const Arguments& more) const {
    Arguments all{"serve", model(), "--tokenizer", "bytes", "--port", "0"};
    if (std::ranges::find(more, "--device") == more.end()) all.insert(all.end(), {"--device", "cpu"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  // Starts the server and waits for its first line.
  void start(const Arguments& more) {
    auto command = words(more);
    command.insert(command.begin(), EFLA_PROGRAM);
    process_ = start_command(command, folder.file("out"), folder.file("err"));
    std::string line;
    for (int i = 0; i < 3000 && !line.ends_with('\n'); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      line = read_text(folder / "out");
    }
    ASSERT_TRUE(line.starts_with("Serving model at http://127.0.0.1:")) << line << read_text(folder / "err");
    port_ = std::stoi(line.substr(line.rfind(':') + 1));
  }
  int stop(int signal = SIGTERM) {
    kill(process_, signal);
    return wait_for(std::exchange(process_, -1));
  }
  json post(const std::string& path, const json& body) const {
    HttpClient client(port_);
    const auto reply = client.post(path, body.dump());
    EXPECT_TRUE(status_of(reply) == 200 || status_of(reply) == 201) << reply;
    return json::parse(body_of(reply));
  }

  const TempFolder folder;
  pid_t process_ = -1;
  int port_ = 0;
};

TEST_F(ServeCommand, ContinuesTextsAsGenerateDoes) {
  start({"--cors", "https://a.example:8443", "--cors", "null", "--cors", "*"});
  EXPECT_EQ(status_of(HttpClient(port_).get("/health")), 200);
  EXPECT_NE(body_of(HttpClient(port_).get("/")).find("<!doctype html>"), std::string::npos);
  const auto reply = post("/v1/completions", {{"prompt", "Once upon"}, {"max_tokens", 30}, {"temperature", 0}});
  const auto generated = run_program(
      {"generate", model(), "--tokenizer", "bytes", "--prompt", "Once upon", "--max-tokens", "30", "--json"});
  ASSERT_EQ(generated.exit_code, 0) << generated.err;
  EXPECT_EQ(reply["choices"][0]["text"], json::parse(generated.out)["text"]);
  EXPECT_EQ(stop(), 0);
  EXPECT_EQ(read_text(folder / "err"), "");
}

TEST_F(ServeCommand, ServesOnAGpuWhereThereIsOne) {
  if (run_program({"info"}).out.find("\ngpus        none") != std::string::npos) {
    EXPECT_TRUE(is_user_mistake(run_program(words({"--device", "cuda"})), "serve: --device: got cuda, expected cpu, "));
    return;
  }
  const auto mistake = run_program(words({"--device", "cuda", "--weights", "int8"}));
  EXPECT_EQ(mistake.exit_code, 2);
  EXPECT_NE(
      mistake.err.find("efla: serve: --weights: got int8 on a GPU, expected float32, bfloat16, or --device cpu\n"),
      std::string::npos)
      << mistake.err;
  const json request{{"prompt", "Once upon"}, {"max_tokens", 30}, {"temperature", 0}};
  std::vector<json> choices;
  for (const char* device : {"cpu", "auto"}) {
    start({"--device", device});
    choices.push_back(post("/v1/completions", request)["choices"]);
    EXPECT_EQ(stop(), 0);
  }
  EXPECT_TRUE(read_text(folder / "err").starts_with("device: cuda:0, "));
  EXPECT_EQ(choices[0], choices[1]);
}

TEST_F(ServeCommand, ChatsHaveTheTemplateOfTheModelsFolder) {
  const std::string text = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
  write_text(std::filesystem::path(model()) / "chat_template.jinja", text);
  const auto chat_template = [&] {
    return json::parse(body_of(HttpClient(port_).get("/tokenizer_info")))["chat_template"];
  };
  start({});
  const json request{{"messages", {{{"role", "user"}, {"content", "ab"}}}}, {"max_tokens", 1}};
  const auto tokens = post("/v1/chat/completions", request)["usage"]["prompt_tokens"];
  EXPECT_EQ(stop(), 0);
  const std::string path = std::getenv("PATH");
  setenv("PATH", "/nonexistent", 1);  // without python3
  start({});
  setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(chat_template(), nullptr);
  const auto plain = post("/v1/chat/completions", request)["usage"]["prompt_tokens"];
  EXPECT_EQ(stop(), 0);
  const auto says = read_text(folder / "err");
  EXPECT_NE(says.find("efla: serve: chats have the template plain, because the model's own one ("), std::string::npos)
      << says;
  EXPECT_NE(says.find("python3-jinja2"), std::string::npos) << says;
  EXPECT_EQ(plain, std::string("User: ab\nAssistant:").size());
  start({});
  if (chat_template() == nullptr) GTEST_SKIP() << "python3 or jinja2 is missing";
  EXPECT_EQ(chat_template(), text);
  EXPECT_EQ(tokens, std::string("<ab>").size());
  EXPECT_EQ(stop(), 0);
  EXPECT_TRUE(is_user_mistake(run_program(words({"--tool-format", "yaml"})), "--tool-format: "));
  EXPECT_TRUE(is_user_mistake(run_program(words({"--chat-template", "none.jinja"})), "none.jinja"));
}

TEST_F(ServeCommand, KeepsSessionsFromOneStartToTheNext) {
  const Arguments sessions{"--sessions", folder.file("sessions")};
  start(sessions);
  post("/v1/sessions", {{"name", "book"}, {"prompt", "Once upon"}});
  post("/v1/sessions", {{"name", "other"}, {"prompt", "A"}});
  const json request{{"session", "book"}, {"max_tokens", 20}, {"temperature", 0}};
  const auto before = post("/v1/completions", request)["choices"][0]["text"];
  EXPECT_EQ(stop(SIGKILL), 128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(folder / "sessions/book.safetensors"));
  start(sessions);
  EXPECT_EQ(post("/v1/completions", request)["choices"][0]["text"], before);
  EXPECT_EQ(status_of(HttpClient(port_).ask("DELETE /v1/sessions/other HTTP/1.1\r\nHost: t\r\n\r\n")), 200);
  EXPECT_FALSE(std::filesystem::exists(folder / "sessions/other.safetensors"));
  EXPECT_EQ(stop(), 0);
  // The file is a session of efla generate, and the other way round.
  const auto continued = run_program({"generate", model(), "--tokenizer", "bytes", "--load-session",
                                      folder.file("sessions/book.safetensors"), "--max-tokens", "20", "--json"});
  ASSERT_EQ(continued.exit_code, 0) << continued.err;
  EXPECT_EQ(json::parse(continued.out)["text"], before);
  write_text(folder / "sessions/broken.safetensors", "rubbish");
  start(sessions);
  EXPECT_EQ(post("/v1/completions", request)["choices"][0]["text"], before);
  EXPECT_NE(read_text(folder / "err").find("broken.safetensors cannot be loaded"), std::string::npos);
  EXPECT_NE(HttpClient(port_).get("/metrics").find("efla:sessions_set_aside 1\n"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(folder / "sessions/broken.safetensors.set-aside"));
  EXPECT_EQ(stop(), 0);
}

TEST_F(ServeCommand, ARenamedFileMovesASessionToAnotherKey) {
  const auto sessions = folder.file("sessions");
  const auto keys = [&](const std::string& key) { return write_text(folder / "keys", key + "\n").string(); };
  const auto client = [](const std::string& key) { return "Authorization: Bearer " + key + "\r\n"; };
  const auto digits = [](const std::string& key) {
    const auto result = run_command({"sh", "-c", "printf %s '" + key + "' | sha256sum | cut -c 1-12"});
    return result.out.substr(0, 12);
  };
  const auto read = [&](const std::string& path) {
    return status_of(
        HttpClient(port_).ask("GET /v1/sessions/" + path + " HTTP/1.1\r\nHost: t\r\n" + client("new") + "\r\n"));
  };
  start({"--sessions", sessions});
  post("/v1/sessions", {{"name", "open"}, {"prompt", "A"}});
  EXPECT_EQ(stop(), 0);
  start({"--sessions", sessions, "--api-keys", keys("old")});
  const auto made = HttpClient(port_).post("/v1/sessions", R"({"name": "book", "prompt": "Once upon"})", client("old"));
  EXPECT_EQ(status_of(made), 201) << made;
  EXPECT_EQ(stop(), 0);
  const Arguments with_new{"--sessions", sessions, "--api-keys", keys("new")};
  start(with_new);
  EXPECT_EQ(read("book"), 404);
  EXPECT_EQ(read("open"), 404);
  EXPECT_EQ(stop(), 0);
  const auto file = [&](const std::string& name) { return folder / ("sessions/" + name + ".safetensors"); };
  std::filesystem::rename(file(digits("old") + ".book"), file(digits("new") + ".book"));
  std::filesystem::rename(file("open"), file(digits("new") + ".open"));
  start(with_new);
  EXPECT_EQ(read("book"), 200);
  EXPECT_EQ(read("open"), 200);
  EXPECT_EQ(stop(), 0);
}

TEST_F(ServeCommand, TakesBackTheStatesThatItSigned) {
  const Arguments keys{"--state-keys", write_text(folder / "keys", "alpha\n").string()};
  const auto put = [&](const std::string& state) {
    return HttpClient(port_).ask("PUT /v1/sessions/back/state HTTP/1.1\r\nHost: t\r\nContent-Length: " +
                                 std::to_string(state.size()) + "\r\n\r\n" + state);
  };
  const json request{{"max_tokens", 20}, {"temperature", 0}, {"return_state", true}};
  start(keys);
  post("/v1/sessions", {{"name", "book"}, {"prompt", "Once upon"}});
  const auto state = body_of(HttpClient(port_).get("/v1/sessions/book/state"));
  auto asked = request;
  asked["session"] = "book";
  const auto before = post("/v1/completions", asked);
  EXPECT_EQ(stop(), 0);
  start(keys);
  EXPECT_EQ(status_of(put(state)), 200);
  asked["session"] = "back";
  EXPECT_EQ(post("/v1/completions", asked)["choices"], before["choices"]);
  auto travelling = request;
  travelling["state"] = before["state"];
  post("/v1/completions", travelling);
  auto changed = state;
  changed.back() = static_cast<char>(changed.back() ^ 1);
  const auto refused = put(changed);
  EXPECT_EQ(status_of(refused), 400) << refused;
  EXPECT_NE(refused.find("a wrong signature"), std::string::npos) << refused;
  EXPECT_EQ(stop(), 0);
  write_text(folder / "book.safetensors", state);
  const auto continued = run_program({"generate", model(), "--tokenizer", "bytes", "--load-session",
                                      folder.file("book.safetensors"), "--max-tokens", "20", "--json"});
  ASSERT_EQ(continued.exit_code, 0) << continued.err;
  EXPECT_EQ(json::parse(continued.out)["text"], before["choices"][0]["text"]);
}

TEST_F(ServeCommand, LosesNoConfirmedTokenWhenItIsKilled) {
  const Arguments sessions{"--sessions", folder.file("sessions")};
  const auto advance_of = [](const std::string& name) {
    return json{{"session", name}, {"save_as", name}, {"max_tokens", 1}, {"temperature", 0}};
  };
  start(sessions);
  post("/v1/sessions", {{"name", "book"}, {"prompt", "Once upon"}});
  std::int64_t confirmed = 9;  // tokens of the prompt
  for (const int ms : {3, 10, 17, 29, 48}) {
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
      stop(SIGKILL);
    });
    for (HttpClient client(port_);; ++confirmed) {
      const auto reply = client.post("/v1/completions", advance_of("book").dump());
      if (!reply.starts_with("HTTP/1.1 200") || client.ended()) break;
    }
    killer.join();
    start(sessions);
    const std::int64_t kept = json::parse(body_of(HttpClient(port_).get("/v1/sessions/book")))["tokens"];
    EXPECT_TRUE(kept == confirmed || kept == confirmed + 1) << kept << " instead of " << confirmed;
    confirmed = kept;
  }
  EXPECT_GT(confirmed, 9);
  // As after the same requests without a kill between them.
  post("/v1/sessions", {{"name", "whole"}, {"prompt", "Once upon"}});
  for (std::int64_t i = 9; i < confirmed; ++i) post("/v1/completions", advance_of("whole"));
  const auto next = [&](const char* session) {
    return post(
        "/v1/completions",
        {{"session", session}, {"max_tokens", 20}, {"logprobs", 3}, {"temperature", 0}})["choices"][0]["logprobs"];
  };
  EXPECT_EQ(next("book"), next("whole"));
  EXPECT_EQ(stop(), 0);
}

TEST_F(ServeCommand, RemovesNoSessionFileThatItDidNotLoad) {
  const Arguments sessions{"--sessions", folder.file("sessions")};
  start(sessions);
  post("/v1/sessions", {{"name", "own"}, {"prompt", "A"}});
  EXPECT_TRUE(is_user_mistake(run_program(words(sessions)), "which process " + std::to_string(process_)));
  write_text(folder / "sessions/foreign.safetensors", "of efla generate --save-session");
  EXPECT_EQ(stop(), 0);
  EXPECT_TRUE(std::filesystem::exists(folder / "sessions/own.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder / "sessions/foreign.safetensors"));
}

TEST_F(ServeCommand, SaysThatASessionCannotBeWritten) {
  start({"--sessions", folder.file("sessions")});
  std::filesystem::create_directories(folder / "sessions/book.safetensors/occupied");
  const auto reply = HttpClient(port_).post("/v1/sessions", json{{"name", "book"}, {"prompt", "Once"}}.dump());
  EXPECT_EQ(status_of(reply), 500) << reply;
  EXPECT_NE(reply.find("book is stored, but not in a file"), std::string::npos) << reply;
  EXPECT_NE(reply.find("\r\nx-should-retry: false\r\n"), std::string::npos) << reply;
  post("/v1/sessions", {{"name", "other"}, {"prompt", "A"}});
  EXPECT_TRUE(std::filesystem::exists(folder / "sessions/other.safetensors"));
  EXPECT_EQ(stop(), 1);
  const auto said = read_text(folder / "err");
  EXPECT_TRUE(said.starts_with("efla: session: book is stored, but not in a file (")) << said;
  EXPECT_EQ(said.find('\n'), said.size() - 1) << said;
}

TEST_F(ServeCommand, WritesSessionsAtItsEndThatItCouldNotWriteBefore) {
  start({"--sessions", folder.file("sessions")});
  std::filesystem::create_directories(folder / "sessions/book.safetensors/occupied");
  const json request{{"prompt", "Once"}, {"save_as", "book"}, {"max_tokens", 3}};
  const auto reply = HttpClient(port_).post("/v1/completions", request.dump());
  EXPECT_EQ(status_of(reply), 500) << reply;
  EXPECT_NE(reply.find("\r\nx-should-retry: false\r\n"), std::string::npos) << reply;
  std::filesystem::remove_all(folder / "sessions/book.safetensors");
  EXPECT_EQ(stop(), 0) << read_text(folder / "err");
  start({"--sessions", folder.file("sessions")});
  EXPECT_EQ(status_of(HttpClient(port_).get("/v1/sessions/book")), 200);
  EXPECT_EQ(stop(), 0);
}

TEST_F(ServeCommand, FinishesStreamsAfterSigterm) {
  start({});
  const auto body = json({{"prompt", "a"}, {"max_tokens", 200}, {"stream", true}, {"logprobs", 0}}).dump();
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<HttpClient>(port_));
    clients.back()->send_post("/v1/completions", body);
  }
  for (const auto& client : clients) client->read_until("data: ");
  EXPECT_EQ(stop(), 0);
  for (const auto& client : clients) EXPECT_NE(client->read_all().find("data: [DONE]"), std::string::npos);
}

// Whoever reads the address may stop the server at once.
TEST_F(ServeCommand, CatchesSigtermBeforeItPrintsItsAddress) {
  const auto out = folder.file("out"), socket = folder.file("socket");
  ASSERT_EQ(mkfifo(out.c_str(), 0600), 0);
  const int pipe = open(out.c_str(), O_RDWR | O_NONBLOCK);
  char bytes[4096] = {};
  while (write(pipe, bytes, sizeof(bytes)) > 0) {  // a full pipe, so that the server waits where it prints
  }
  process_ = start_command(
      {EFLA_PROGRAM, "serve", model(), "--tokenizer", "bytes", "--device", "cpu", "--unix-socket", socket}, out,
      folder.file("err"));
  for (int i = 0; i < 3000 && !std::filesystem::exists(socket); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const auto status = read_text("/proc/" + std::to_string(process_) + "/status");
  const std::string caught = "SigCgt:";
  const auto mask = std::stoull(status.substr(status.find(caught) + caught.size()), nullptr, 16);
  EXPECT_NE(mask & (1ULL << (SIGTERM - 1)), 0U) << status << read_text(folder / "err");
  std::string printed;
  for (int i = 0; i < 3000 && printed.find("--state-memory") == std::string::npos; ++i) {
    const auto size = read(pipe, bytes, sizeof(bytes));
    if (size > 0) printed.append(bytes, static_cast<std::size_t>(size));
    if (size < 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(stop(), 0);
  close(pipe);
}

TEST_F(ServeCommand, CancelsAfterTheGrace) {
  start({"--grace", "0", "--max-tokens", "1000000"});
  HttpClient client(port_);
  const auto body = json({{"prompt", "a"}, {"max_tokens", 1000000}, {"stream", true}}).dump();
  client.send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
  client.read_until("data: ");
  EXPECT_EQ(stop(), 0);
}

TEST_F(ServeCommand, RefusesMistakes) {
  const auto refused = [&](const Arguments& more, const std::string& part) {
    const auto result = run_program(words(more));
    EXPECT_TRUE(is_user_mistake(result, part)) << testing::PrintToString(more);
  };
  refused({"--port", "70000"}, "--port");
  refused({"--host", "192.0.2.1"}, "serve: --host: got 192.0.2.1 (");
  refused({"--unix-socket", folder.file("socket")}, "serve: --port: got 0 with --unix-socket, expected one of the two");
  EXPECT_TRUE(
      is_user_mistake(run_program({"serve", model(), "--unix-socket", folder.file("socket"), "--host", "localhost"}),
                      "serve: --host: got localhost with --unix-socket, expected one of the two"));
  for (const char* origin : {"foo", "", "https://", "https://a.example/", "https://A.example", "HTTPS://a.example",
                             "https://a b", "a.example:80", "https://a.example?x", "https://u@a.example"}) {
    refused({"--cors", origin}, std::string("serve: --cors: got '") + origin +
                                    "', expected * or an origin as browsers send it, such as https://a.example:8443");
  }
  const auto keys = write_text(folder / "keys", "al pha\n").string();
  refused({"--api-keys", keys}, "ASCII in key 1 of " + keys);
  for (const char* option : {"--max-body", "--request-memory"}) {
    refused({option, "0"},
            std::string("serve: ") + option + ": got '0', expected a number of bytes from 1, such as 512MB");
  }
  refused({"--tls-key", folder.file("none")}, "--tls-certificate");
  refused({"--api-keys", folder.file("none")}, "none");
  refused({"--chat-template", folder.file("none")},
          "serve: --chat-template: got '" + folder.file("none") +
              "', expected plain, chatml, or a Jinja or TOML file that exists");
  const auto chat = write_text(folder / "chat.toml", "user = \"{content}\"\nassistant = 3\n").string();
  refused({"--chat-template", chat}, chat + ": assistant: got 3, expected a text");
  refused({"--chat-template", write_text(folder / "cut.toml", "user = \"").string()}, "cut.toml: at byte ");
  refused({"--sessions", model() + "/config.json"}, "--sessions");
  refused({"--swap", model() + "/config.json"}, "serve: --swap: got " + model() + "/config.json, expected a folder");
  refused({"--cache-memory", "9999999999999999999"}, "serve: --cache-memory: got states, sessions, cache and weights");
  refused({"--state-memory", "1"}, "serve: --state-memory: got 1, expected at least");
  for (const char* size : {"2 parsecs", "1.5GB", "x", "99999999999999999999", "99999999999TB", "-1", ""}) {
    refused({"--state-memory", size},
            std::string("serve: --state-memory: got '") + size + "', expected a number of bytes, such as 512MB");
  }
  for (const char* size : {"1023", "2MB"}) {
    refused({"--max-header", size},
            std::string("serve: --max-header: got '") + size + "', expected a number of bytes from 1024 to 1048576");
  }
  refused({"--max-queue", "0"}, "serve: --max-queue: got 0, expected 1 to 1099511627776");
  refused({"--weights", "int3"}, "serve: --weights: ");
  refused({"--prot", "80"}, "nearest is --port");
  EXPECT_TRUE(is_user_mistake(run_program({"serve", folder.file("none")}), "none"));
  write_text(model() + "/run.json", R"({"tokenizer": {"fingerprint": 3}})");
  refused({}, "run.json: tokenizer.fingerprint: got 3, expected a text");
  write_text(model() + "/run.json", R"({"tokenizer": {"fingerprint": "0", "name": []}})");
  refused({}, "run.json: tokenizer.name: got [], expected a text");
}

}  // namespace
}  // namespace efla::test
