#include <algorithm>
#include <memory>
#include <vector>

#include "efla/serve/http/connection.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

using serve::Connection;
using serve::ConnectionHost;

constexpr std::size_t kMostBody = 2000;

// A connection whose socket is memory: bytes arrive in pieces, and every write succeeds at the next piece.
class MemoryConnection : public Connection {
 public:
  using Connection::Connection;

  void feed(io::ByteView bytes) {
    std::size_t size = 1;
    while (!bytes.empty() && !closed_) {
      finish_write();
      if (room_.empty()) {  // the server wants no more: it owes a reply, or writes
        if (writing_) continue;
        break;
      }
      const auto n = std::min({size, room_.size(), bytes.size()});
      std::copy_n(bytes.begin(), n, room_.begin());
      bytes = bytes.subspan(n);
      room_ = {};
      received(false, n);
      size = size * 2 + 1;
    }
    while (!closed_ && writing_) finish_write();
    if (!room_.empty() && !closed_) {
      room_ = {};
      received(true, 0);
    }
    while (!closed_ && writing_) finish_write();
  }

  bool closed() const { return closed_; }
  const std::string& sent() const { return sent_; }

 private:
  void start_read(std::span<char> room) override {
    require(room_.empty() && !closed_, "one read at a time");
    room_ = room;
  }
  void start_write(std::string_view bytes) override {
    require(!writing_ && !closed_ && !bytes.empty(), "one write at a time");
    sent_ += bytes;
    writing_ = true;
  }
  void close_sending() override {}
  void close_socket() override {
    require(!closed_, "one close");
    closed_ = true;
  }
  void finish_write() {
    if (!writing_) return;
    writing_ = false;
    written(false);
  }

  std::span<char> room_;
  std::string sent_;
  bool writing_ = false, closed_ = false;
};

}  // namespace

void http_requests(io::ByteView bytes) {
  int handled = 0, gone = 0, held = 0, closed = 0;
  ConnectionHost host;
  host.options.max_header_bytes = 1000;
  host.options.max_body_bytes = kMostBody;
  host.options.cors_origins = {"https://a.example"};
  host.check = [](const serve::HttpRequest& head) -> std::optional<serve::HttpReply> {
    if (head.path == "/secret") return serve::HttpReply{.status = 401, .body = "no"};
    return std::nullopt;
  };
  Connection* now = nullptr;
  std::uint64_t number = 0;
  host.exchange = [&](Connection& connection, std::uint64_t serial, const std::shared_ptr<serve::RequestHold>&) {
    now = &connection;
    number = serial;
    return nullptr;
  };
  host.handle = [&](const serve::HttpRequest& request, const std::shared_ptr<serve::HttpExchange>&) {
    ++handled;
    require(request.body.size() <= kMostBody, "a body within its limit");
    now->set_gone(number, [&] { ++gone; });
    if (request.path == "/hold") {
      ++held;
      now->begin_events(number);
      return now->write(number, "data: a\n\n");
    }
    if (request.path == "/stream") {
      now->begin_events(number);
      now->write(number, "data: a\n\n");
      return now->end(number);
    }
    if (request.path == "/drop") return now->abandon(number);
    now->reply(number, {.body = request.path + request.body});
  };
  host.closed = [&](Connection&) { ++closed; };
  const auto connection = std::make_shared<MemoryConnection>(host);
  connection->begin();
  connection->feed(bytes);
  require(connection->sent().empty() || connection->sent().starts_with("HTTP/1."), "replies of HTTP");
  connection->close();
  require(closed == 1 && connection->closed(), "one end of the connection");
  require(gone == held, "word of a client that left for each request without a reply");
  connection->set_gone(number, [&] { ++gone; });
  require(gone == held + 1, "word of a client that left before somebody asked");
  require(*host.request_bytes == 0, "no bytes of requests that are still counted");
  std::uint64_t replies = 0;
  for (const auto& [status, count] : host.replies) replies += count;
  require(replies >= static_cast<std::uint64_t>(handled), "a reply to each request");
}

}  // namespace efla::fuzz
