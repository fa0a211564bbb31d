// An HTTP/1.1 server over TCP, TLS or a Unix socket, without routes: requests go to two functions, replies come back
// whole or as a stream of events, from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                        // 0: a free one
  std::string unix_socket;                // a path, in place of host and port
  std::string tls_certificate, tls_key;   // PEM files; both or none
  std::vector<std::string> cors_origins;  // pages of these origins may call; "*": of any
  std::size_t max_header_bytes = 16 << 10;
  std::size_t max_body_bytes = 64 << 20;
  std::size_t request_memory = 512 << 20;  // bytes that all requests hold: bodies, what is made of them, replies
  std::size_t max_unsent_bytes = 4 << 20;  // of a stream whose client does not read
  std::size_t max_connections = 4096;
  std::chrono::milliseconds timeout{30'000};       // for a header, and for each 64 KiB of a body in either direction
  std::chrono::milliseconds idle_timeout{75'000};  // between requests
  std::chrono::milliseconds ping{15'000};          // a stream without events gets a comment
  bool catch_signals = false;  // SIGINT and SIGTERM, from the constructor on: run() reports the ones before it too
};

struct HttpRequest {
  std::string method, path, query;  // path: what path_of returns (syntax.h), percent-encoded; query: without "?"
  std::string authorization, api_key, content_type, content_encoding;  // api_key: of x-api-key
  std::string body;
};

struct HttpReply {
  int status = 200;
  std::string body = {};
  std::string type = "application/json";
  std::vector<std::string> fields = {};  // more header lines, such as "Retry-After: 1"
};

// A request that needs more memory than HttpOptions::request_memory has left, or than it has at all (`alone`).
struct NoRequestMemory : std::exception {
  NoRequestMemory(bool alone, std::size_t needed, std::size_t limit) : alone(alone), needed(needed), limit(limit) {}
  const char* what() const noexcept override {
    return alone ? "the request needs more memory than the server has for requests"
                 : "the requests that wait and run take all the memory for requests";
  }
  // Returns what() with the numbers of bytes and the option.
  std::string sentence() const {
    return std::string(what()) + ": got " + std::to_string(needed) + " bytes, expected at most " +
           std::to_string(limit) + " (--request-memory)";
  }
  bool alone;
  std::size_t needed,
      limit;  // bytes that the request (`alone`) or all requests together would hold, of at most `limit`
};

// A request whose reply nobody waits for any more.
struct RequestGone : std::exception {
  const char* what() const noexcept override { return "the request was cancelled"; }
};

// The reply to one request. Any thread may call the functions. A request whose exchange is destroyed without a reply
// gets status 503; a stream without an end is cut. Functions that throw std::bad_alloc have sent nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  // Returns whether nobody waits for the reply: the client has left, or the server's stop has cancelled the request.
  virtual bool gone() const = 0;

  // Counts memory that the request holds besides its body, until the reply is sent: bytes > 0 before the memory is
  // taken, bytes < 0 after it is freed. For bytes > 0 throws RequestGone, so that long work ends with its client, and
  // NoRequestMemory.
  virtual void hold(std::ptrdiff_t bytes) = 0;

  // Sends a whole reply.
  virtual void reply(HttpReply reply) = 0;

  // Sends a reply of server-sent events: begin, then write with whole events, then end.
  virtual void begin_events() = 0;
  virtual void write(std::string_view events) = 0;
  virtual void end() = 0;

  // Sets the function that is called, on the server's thread, when the client leaves before the end of its reply, or
  // when the server stops before it and can still send an error. Calls it at once if the client has left, or if the
  // reply is over.
  virtual void on_gone(std::function<void()> gone) = 0;
};

class HttpServer {
 public:
  // Returns the reply to a request that is refused before its body is read.
  using Check = std::function<std::optional<HttpReply>(const HttpRequest& head)>;
  using Handle = std::function<void(HttpRequest request, std::shared_ptr<HttpExchange> exchange)>;

  // Listens from now on. `check` and `handle` are called on the thread of run(). Throws Error that names the option,
  // and IoError for files that cannot be read.
  HttpServer(const HttpOptions& options, Check check, Handle handle);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Returns, for example, "http://127.0.0.1:8080" or "unix:/run/efla.socket".
  const std::string& address() const;

  // Serves until it is stopped. SIGINT and SIGTERM call `signalled` on this thread.
  void run(std::function<void()> signalled = {});

  // Calls a function on one of two threads for work that would delay other requests: one for tasks that take long, and
  // one for the others, which therefore never wait for them. A task's exceptions are ignored.
  enum class Lane { quick, slow };
  void work(Lane lane, std::function<void()> task);
  // Calls a function on the thread of run() after a time.
  void after(std::chrono::milliseconds time, std::function<void()> task);

  // Stops once every request is answered. After `grace` cancels the others, and closes their connections when they are
  // answered, or two seconds later. Any thread may call it.
  void stop(std::chrono::milliseconds grace);

  std::int64_t connections() const;    // open now
  std::int64_t request_bytes() const;  // of memory that requests hold
  // Returns the number of replies so far by status. On the thread of run() alone.
  const std::map<int, std::uint64_t>& replies() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace efla::serve
