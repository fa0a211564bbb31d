// The HTTP server over real sockets: replies, streams, pipelining, limits, slow and rude clients, TLS, Unix sockets.
#include "efla/serve/http/http.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

#include "tests/support/expect_error.h"
#include "tests/support/http_client.h"
#include "tests/support/program.h"

namespace efla::serve {
namespace {

using namespace std::chrono_literals;
using test::body_of;
using test::HttpClient;
using test::status_of;

// Serves /echo (the body), /stream (three events from another thread), /hold (a stream without an end), /drop.
class HttpServing : public testing::Test {
 protected:
  void SetUp() override {
    options_.port = 0;
    options_.max_body_bytes = 100'000;
  }
  void TearDown() override {
    if (!thread_.joinable()) return;
    server_->stop(0ms);
    thread_.join();
    for (auto& writer : writers_) writer.join();
  }

  void start() {
    server_ = std::make_unique<HttpServer>(
        options_,
        [](const HttpRequest& head) -> std::optional<HttpReply> {
          if (head.path == "/secret") return HttpReply{.status = 401, .body = "no"};
          return std::nullopt;
        },
        [this](HttpRequest request, std::shared_ptr<HttpExchange> exchange) { handle(std::move(request), exchange); });
    const auto address = server_->address();
    if (address.starts_with("http")) port_ = std::stoi(address.substr(address.rfind(':') + 1));
    thread_ = std::thread([this] { server_->run(); });
  }

  void handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
    if (request.path == "/stream") {
      writers_.emplace_back([exchange] {
        exchange->begin_events();
        for (int i = 0; i < 3; ++i) exchange->write("data: " + std::to_string(i) + "\n\n");
        exchange->end();
      });
    } else if (request.path == "/hold") {
      exchange->on_gone([this] { ++gone_; });
      exchange->begin_events();
      exchange->write("data: held\n\n");
      held_ = exchange;
    } else if (request.path == "/cancelled") {
      exchange->on_gone([exchange] { exchange->reply({.status = 503, .body = "stopped"}); });
    } else if (request.path == "/later") {
      server_->work(HttpServer::Lane::quick, [exchange] { exchange->reply({.body = "later"}); });
    } else if (request.path != "/drop") {
      exchange->reply({.body = request.method + " " + request.path + " " + request.query + " " + request.body});
    }
  }

  // Waits until a count is reached, for at most ten seconds.
  template <class Count>
  static bool reaches(const Count& count, std::int64_t value) {
    for (int i = 0; i < 1000 && count() != value; ++i) std::this_thread::sleep_for(10ms);
    return count() == value;
  }

  HttpOptions options_;
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
  std::vector<std::thread> writers_;
  std::shared_ptr<HttpExchange> held_;
  std::atomic<int> gone_ = 0;
  int port_ = 0;
};

TEST_F(HttpServing, AnswersAndKeepsTheConnection) {
  start();
  HttpClient client(port_);
  for (int i = 0; i < 3; ++i) {
    const auto reply = client.get("/a?b=c");
    EXPECT_EQ(status_of(reply), 200);
    EXPECT_EQ(body_of(reply), "GET /a b=c ");
    EXPECT_EQ(reply.find("Connection: close"), std::string::npos);
  }
  EXPECT_EQ(body_of(client.post("/echo", "some text")), "POST /echo  some text");
  EXPECT_EQ(body_of(client.get("/later")), "later");
  EXPECT_EQ(status_of(client.get("/drop")), 503);
  EXPECT_EQ(status_of(client.get("/a")), 200);
}

TEST_F(HttpServing, ReadsChunkedBodiesAndBodiesInPieces) {
  start();
  HttpClient client(port_);
  EXPECT_EQ(body_of(client.ask("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
                               "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")),
            "POST /echo  abcde");
  const std::string body(50'000, 'x');
  const std::string request = "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 50000\r\n\r\n" + body;
  for (std::size_t i = 0; i < request.size(); i += 997) {
    client.send(request.substr(i, 997));
    if (i % 7 == 0) std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(body_of(client.read_reply()), "POST /echo  " + body);
}

TEST_F(HttpServing, SaysContinueBeforeABodyThatItWillRead) {
  start();
  HttpClient client(port_);
  client.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("ab");
  EXPECT_EQ(body_of(client.read_reply()), "POST /echo  ab");
  HttpClient refused(port_);
  refused.send("POST /secret HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(status_of(refused.read_all()), 401);
}

TEST_F(HttpServing, AnswersPipelinedRequestsInOrder) {
  start();
  HttpClient client(port_);
  std::string requests;
  for (int i = 0; i < 300; ++i) {
    const auto path = i % 50 == 7 ? std::string("/stream") : i % 3 == 0 ? "/later" : "/p" + std::to_string(i);
    requests += "GET " + path + " HTTP/1.1\r\nHost: t\r\n\r\n";
  }
  client.send(requests);
  for (int i = 0; i < 300; ++i) {
    const auto body = body_of(client.read_reply());
    if (i % 50 == 7) {
      EXPECT_EQ(body, "data: 0\n\ndata: 1\n\ndata: 2\n\n") << i;
    } else {
      EXPECT_EQ(body, i % 3 == 0 ? "later" : "GET /p" + std::to_string(i) + "  ") << i;
    }
  }
}

TEST_F(HttpServing, StreamsToHttp10WithoutChunks) {
  start();
  HttpClient client(port_);
  client.send("GET /stream HTTP/1.0\r\n\r\n");
  const auto reply = client.read_all();
  EXPECT_TRUE(reply.starts_with("HTTP/1.0 200 OK\r\n")) << reply;
  EXPECT_EQ(body_of(reply), "data: 0\n\ndata: 1\n\ndata: 2\n\n");
  EXPECT_TRUE(client.ended());
}

TEST_F(HttpServing, RefusesWhatIsTooLarge) {
  start();
  HttpClient header(port_);
  header.send("GET / HTTP/1.1\r\nHost: t\r\nX: " + std::string(20'000, 'x'));
  EXPECT_EQ(status_of(header.read_all()), 431);
  EXPECT_TRUE(header.ended());
  HttpClient flood(port_);
  std::string fields;
  for (int i = 0; i < 2000; ++i) fields += "A" + std::to_string(i) + ": b\r\n";
  flood.send("GET / HTTP/1.1\r\nHost: t\r\n" + fields + "\r\n");
  EXPECT_EQ(status_of(flood.read_all()), 431);
  HttpClient body(port_);
  body.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000000\r\n\r\n");
  EXPECT_EQ(status_of(body.read_all()), 413);
  HttpClient chunks(port_);
  chunks.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
  std::string reply;
  for (int i = 0; i < 200 && chunks.send("400\r\n" + std::string(1024, 'x') + "\r\n"); ++i) {
  }
  EXPECT_EQ(status_of(chunks.read_all()), 413);
}

TEST_F(HttpServing, HoldsTheBodiesOfAllRequestsToABound) {
  options_.request_memory = 250'000;
  start();
  const auto post = [](const std::string& path, std::size_t size) {
    return "POST " + path + " HTTP/1.1\r\nHost: t\r\nContent-Length: " + std::to_string(size) + "\r\n\r\n" +
           std::string(size, 'x');
  };
  HttpClient reading(port_), refused(port_);
  {
    HttpClient held(port_);
    held.send(post("/hold", 99'000));  // a request without an end
    held.read_until("held");
    const auto most = post("/echo", 99'000);
    reading.send(most.substr(0, most.size() - 1'000));
    EXPECT_TRUE(reaches([&] { return server_->request_bytes(); }, 99'000 + 98'000));
    const auto reply = refused.ask(post("/echo", 99'000));
    EXPECT_EQ(status_of(reply), 503);
    EXPECT_NE(reply.find("Retry-After: 1"), std::string::npos) << reply;
    EXPECT_EQ(status_of(HttpClient(port_).ask(post("/echo", 9'000))), 200);
    EXPECT_EQ(status_of(HttpClient(port_).get("/health")), 200);
  }
  held_.reset();  // the client has left, and the request has ended
  EXPECT_EQ(status_of(HttpClient(port_).ask(post("/echo", 99'000))), 200);
  reading.close();
  EXPECT_TRUE(reaches([&] { return server_->connections(); }, 0));
  EXPECT_EQ(server_->request_bytes(), 0);
  options_.request_memory = 99'000;
  test::expect_error([&] { HttpServer(options_, {}, {}); }, "request_memory", "at least the 100000 bytes");
}

TEST_F(HttpServing, RefusesWhatIsNotHttp) {
  start();
  for (const std::string request :
       {"\x16\x03\x01\x02", "GET\r\n\r\n", "GET / HTTP/2.7\r\n\r\n", "GET / HTTP/1.1\r\nbad header\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n", "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}) {
    HttpClient client(port_);
    client.send(request + std::string(16, '\n'));
    EXPECT_EQ(status_of(client.read_all()), 400) << request;
    EXPECT_TRUE(client.ended()) << request;
  }
  EXPECT_TRUE(reaches([&] { return server_->connections(); }, 0));
}

TEST_F(HttpServing, EndsSlowClients) {
  options_.timeout = 300ms;
  start();
  HttpClient silent(port_), header(port_), body(port_);
  body.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n");
  for (int i = 0; i < 30 && !header.ended(); ++i) {  // a header that would take for ever
    header.send("x");
    body.send(i < 5 ? "b" : "");
    std::this_thread::sleep_for(30ms);
  }
  EXPECT_EQ(status_of(header.read_all()), 408);
  EXPECT_EQ(status_of(body.read_all()), 408);
  EXPECT_EQ(silent.read_all(), "");
  EXPECT_TRUE(silent.ended());
  EXPECT_TRUE(reaches([&] { return server_->connections(); }, 0));
}

TEST_F(HttpServing, EndsClientsThatDoNotRead) {
  options_.max_unsent_bytes = 1 << 20;
  start();
  HttpClient client(port_);
  client.send("GET /hold HTTP/1.1\r\nHost: t\r\n\r\n");
  client.read_until("held");
  const std::string event = "data: " + std::string(100'000, 'x') + "\n\n";
  for (int i = 0; i < 1000 && gone_ == 0; ++i) {
    held_->write(event);
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(gone_, 1);
}

TEST_F(HttpServing, PipelinedRequestsWithoutReaderStopBeingRead) {
  start();
  HttpClient client(port_);
  std::string requests;
  for (int i = 0; i < 100; ++i) requests += "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nbody";
  std::atomic<std::size_t> sent = 0;
  std::thread sender([&] {
    while (sent < (64U << 20) && client.send(requests)) sent += requests.size();
  });
  std::size_t before = 1;
  while (sent != before) {
    before = sent;
    std::this_thread::sleep_for(300ms);
  }
  EXPECT_LT(sent, 64U << 20);  // the socket's buffers are full, and the server holds no more
  server_->stop(0ms);
  sender.join();
}

TEST_F(HttpServing, TellsThatAClientHasLeft) {
  start();
  for (const bool half : {false, true}) {
    HttpClient client(port_);
    client.send("GET /hold HTTP/1.1\r\nHost: t\r\n\r\n");
    client.read_until("held");
    half ? client.close_sending() : client.close();
    EXPECT_TRUE(reaches([&] { return gone_.load(); }, half ? 2 : 1));
  }
  // A function that is set afterwards is called too.
  bool called = false;
  held_->on_gone([&] { called = true; });
  server_->stop(0ms);
  thread_.join();
  EXPECT_TRUE(called);
}

TEST_F(HttpServing, AnswersAHalfClosedClient) {
  start();
  HttpClient client(port_);
  client.send("GET /a HTTP/1.1\r\nHost: t\r\n\r\n");
  client.close_sending();
  EXPECT_EQ(body_of(client.read_all()), "GET /a  ");
  EXPECT_TRUE(client.ended());
}

TEST_F(HttpServing, SendsCommentsInASilentStream) {
  options_.ping = 200ms;
  start();
  HttpClient client(port_);
  client.send("GET /hold HTTP/1.1\r\nHost: t\r\n\r\n");
  client.read_until("held");
  EXPECT_NE(client.read_until(": ping\n\n").find(": ping"), std::string::npos);
  EXPECT_NE(client.read_until(": ping\n\n").find(": ping"), std::string::npos);
}

TEST_F(HttpServing, TakesManyConnectionsAndNoMoreThanItsLimit) {
  options_.max_connections = 50;
  start();
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 200; ++i) clients.push_back(std::make_unique<HttpClient>(port_));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(status_of(clients[i]->get("/a")), 200);
  EXPECT_EQ(server_->connections(), 50);
  for (int i = 0; i < 150; ++i) clients[i]->close();  // those that wait come next
  for (int i = 150; i < 200; ++i) EXPECT_EQ(status_of(clients[i]->get("/a")), 200) << i;
}

TEST_F(HttpServing, OutlivesTenThousandConnections) {
  options_.max_connections = 64;
  start();
  for (int i = 0; i < 10'000; ++i) {
    HttpClient client(port_);
    if (i % 3 == 1) client.send("GET /a");
    if (i % 3 == 2) client.send("GET /a HTTP/1.1\r\nHost: t\r\n\r\n");
  }
  EXPECT_EQ(body_of(HttpClient(port_).get("/a")), "GET /a  ");
  EXPECT_TRUE(reaches([&] { return server_->connections(); }, 0));
}

TEST_F(HttpServing, CorsOnlyForListedOrigins) {
  options_.cors_origins = {"https://a.example"};
  start();
  HttpClient client(port_);
  const auto from = [&](const std::string& method, const std::string& origin) {
    return client.ask(method + " /a HTTP/1.1\r\nHost: t\r\nOrigin: " + origin + "\r\n\r\n");
  };
  EXPECT_NE(from("GET", "https://a.example").find("Access-Control-Allow-Origin: https://a.example"), std::string::npos);
  EXPECT_EQ(from("GET", "https://b.example").find("Access-Control"), std::string::npos);
  EXPECT_EQ(status_of(from("OPTIONS", "https://a.example")), 204);
  EXPECT_NE(status_of(from("OPTIONS", "https://b.example")), 204);
}

TEST_F(HttpServing, PagesMaySendAnyHeaderAndReadRetryAfter) {
  options_.cors_origins = {"*"};
  start();
  HttpClient client(port_);
  const auto preflight = [&](const std::string& fields) {
    const auto reply = client.ask("OPTIONS /a HTTP/1.1\r\nHost: t\r\nOrigin: https://a.example\r\n" + fields + "\r\n");
    EXPECT_EQ(status_of(reply), 204) << reply;
    return reply;
  };
  const std::string openai = "authorization,content-type,x-stainless-arch,x-stainless-retry-count";
  EXPECT_NE(preflight("Access-Control-Request-Headers: " + openai + "\r\n")
                .find("\r\nAccess-Control-Allow-Headers: " + openai + "\r\n"),
            std::string::npos);
  for (const char* fields : {"", "Access-Control-Request-Headers: \r\n", "Access-Control-Request-Headers: a b\r\n",
                             "Access-Control-Request-Headers: a, \"b\"\r\n"}) {
    EXPECT_EQ(preflight(fields).find("Access-Control-Allow-Headers"), std::string::npos) << fields;
  }
  const auto reply = client.ask("GET /a HTTP/1.1\r\nHost: t\r\nOrigin: https://a.example\r\n\r\n");
  EXPECT_NE(reply.find("\r\nAccess-Control-Expose-Headers: Retry-After\r\n"), std::string::npos) << reply;
}

TEST_F(HttpServing, StopsAfterTheLastReply) {
  start();
  HttpClient idle(port_), busy(port_);
  EXPECT_EQ(status_of(idle.get("/a")), 200);
  busy.send("GET /hold HTTP/1.1\r\nHost: t\r\n\r\n");
  busy.read_until("held");
  server_->stop(60s);
  EXPECT_EQ(idle.read_all(), "");
  EXPECT_TRUE(idle.ended());
  HttpClient late(port_);  // still answered, as a probe of health needs it
  EXPECT_NE(late.get("/a").find("Connection: close"), std::string::npos);
  held_->write("data: last\n\n");
  held_->end();
  EXPECT_NE(busy.read_all().find("data: last"), std::string::npos);
  thread_.join();
  EXPECT_EQ(gone_, 0);
}

TEST_F(HttpServing, AnswersRequestsThatTheStopCancels) {
  start();
  HttpClient cancelled(port_), silent(port_);
  cancelled.send("GET /cancelled HTTP/1.1\r\nHost: t\r\n\r\n");
  silent.send("GET /hold HTTP/1.1\r\nHost: t\r\n\r\n");
  silent.read_until("held");
  server_->stop(0ms);
  const auto reply = cancelled.read_all();
  EXPECT_EQ(status_of(reply), 503) << reply;
  EXPECT_EQ(body_of(reply), "stopped");
  thread_.join();  // a request that is not answered does not keep the server
  EXPECT_EQ(gone_, 1);
  silent.read_all();
  EXPECT_TRUE(silent.ended());
}

TEST_F(HttpServing, CatchesSignalsFromTheConstructorOn) {
  options_.catch_signals = true;
  HttpServer server(options_, {}, {});
  kill(getpid(), SIGTERM);
  int signals = 0;
  server.run([&] {
    ++signals;
    server.stop(0ms);
  });
  EXPECT_EQ(signals, 1);
}

TEST_F(HttpServing, OnAUnixSocket) {
  const test::TempFolder folder;
  options_.unix_socket = folder.file("socket");
  start();
  EXPECT_EQ(server_->address(), "unix:" + options_.unix_socket);
  HttpClient client(options_.unix_socket);
  EXPECT_EQ(body_of(client.get("/a")), "GET /a  ");
  test::expect_error([&] { HttpServer(options_, {}, {}); }, "unix_socket", "which a program listens on");
  TearDown();
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(options_.unix_socket));
}

TEST_F(HttpServing, WithTls) {
  const test::TempFolder folder;
  const auto made =
      test::run_command({"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout",
                         folder.file("key"), "-out", folder.file("certificate")});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  options_.tls_certificate = folder.file("certificate");
  options_.tls_key = folder.file("key");
  start();
  const auto url = "https://localhost:" + std::to_string(port_);
  for (const std::string path : {"/a", "/stream"}) {
    const auto got = test::run_command({"curl", "-sS", "--noproxy", "*", "--cacert", folder.file("certificate"),
                                        "--resolve", "localhost:" + std::to_string(port_) + ":127.0.0.1", url + path});
    EXPECT_EQ(got.exit_code, 0) << got.err;
    EXPECT_EQ(got.out, path == "/a" ? "GET /a  " : "data: 0\n\ndata: 1\n\ndata: 2\n\n");
  }
  HttpClient plain(port_);  // no handshake
  plain.send("GET / HTTP/1.1\r\nHost: t\r\n\r\n");
  plain.read_all();
  EXPECT_TRUE(plain.ended());
  options_.tls_key = folder.file("certificate");
  test::expect_error([&] { HttpServer(options_, {}, {}); }, "tls_key", "expected a PEM file");
  options_.tls_key = folder.file("none");
  test::expect_io_error([&] { HttpServer(options_, {}, {}); }, IoError::Kind::missing, -1,
                        "none: cannot open it: No such");
  options_.tls_key.clear();
  test::expect_error([&] { HttpServer(options_, {}, {}); }, "tls_key", "none");
}

TEST_F(HttpServing, RefusesAddressesThatItCannotListenOn) {
  start();
  const auto with = [&](const std::string& host, int port) {
    HttpOptions options;
    options.host = host;
    options.port = port;
    return options;
  };
  test::expect_error([&] { HttpServer(with("127.0.0.1", 70'000), {}, {}); }, "port", "70000");
  test::expect_error([&] { HttpServer(with("no.such.host.invalid", 1), {}, {}); }, "host", "no.such.host");
  test::expect_error([&] { HttpServer(with("192.0.2.1", 1), {}, {}); }, "host", "192.0.2.1 (");
  const int used = port_;
  test::expect_error([&] { HttpServer(with("127.0.0.1", used), {}, {}); }, "port", "127.0.0.1:" + std::to_string(used));
}

}  // namespace
}  // namespace efla::serve
