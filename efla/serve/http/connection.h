// The protocol of one connection, without its socket: bytes become requests, replies become bytes, and deadlines end
// connections of clients that are too slow. Pipelined requests are answered one after the other.
#pragma once

#include <array>
#include <atomic>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "efla/serve/http/http.h"
#include "efla/serve/http/send_queue.h"

namespace efla::serve {

using Clock = std::chrono::steady_clock;

class Connection;

// What one request holds, shared by its connection and its exchange: memory, as a part of the memory of all requests,
// and whether somebody waits for the reply. Threads may call any function at once.
class RequestHold {
 public:
  using Total = std::shared_ptr<std::atomic<std::size_t>>;

  RequestHold(Total total, std::size_t limit) : total_(std::move(total)), limit_(limit) {}
  ~RequestHold() { *total_ -= bytes_; }
  RequestHold(const RequestHold&) = delete;
  RequestHold& operator=(const RequestHold&) = delete;

  // Adds bytes that are about to be taken, or subtracts bytes that were freed. Throws NoRequestMemory, only for bytes >
  // 0, where all requests would hold more than the limit.
  void add(std::ptrdiff_t bytes) {
    const auto change = static_cast<std::size_t>(bytes);
    const auto own = bytes_ += change;
    const auto all = *total_ += change;
    if (all <= limit_ || bytes <= 0) return;
    bytes_ -= change;
    *total_ -= change;
    throw NoRequestMemory(own > limit_, own > limit_ ? own : all, limit_);
  }
  std::size_t bytes() const { return bytes_; }

  void set_gone() { gone_ = true; }
  bool gone() const { return gone_; }
  // The exchange has ended without a reply. The connection notices it within the time of check_deadline.
  void set_abandoned() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

 private:
  const Total total_;
  const std::size_t limit_;
  std::atomic<std::size_t> bytes_ = 0;
  std::atomic<bool> gone_ = false, abandoned_ = false;
};

// Tells a request that nobody waits for its reply. If `gone` fails for lack of memory, the request continues until it
// asks whether it is gone.
inline void tell(const std::function<void()>& gone) noexcept {
  try {
    if (gone) gone();
  } catch (...) {
  }
}

// What the connections of a server share.
struct ConnectionHost {
  HttpOptions options;
  HttpServer::Check check;
  HttpServer::Handle handle;
  std::function<std::shared_ptr<HttpExchange>(Connection&, std::uint64_t serial, std::shared_ptr<RequestHold>)>
      exchange;
  std::function<void(Connection&)> closed;
  std::map<int, std::uint64_t> replies;  // by status
  RequestHold::Total request_bytes = std::make_shared<std::atomic<std::size_t>>(0);
  bool stopping = false;  // answers end with "Connection: close"
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  explicit Connection(ConnectionHost& host)
      : host_(host),
        unsent_(host.request_bytes, host.options.request_memory),
        read_deadline_(Clock::now() + host.options.timeout) {}
  virtual ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Begins to read; bytes may come from now on.
  void begin();

  // Replies to the request with this number; without effect if it is over. See HttpExchange.
  void reply(std::uint64_t serial, HttpReply reply);
  void begin_events(std::uint64_t serial);
  void write(std::uint64_t serial, std::string_view events);
  void end(std::uint64_t serial);
  void abandon(std::uint64_t serial);  // its exchange is destroyed

  // Continues with what was received and written in the meantime.
  void proceed();

  // Ends the connection if its deadline is over, and sends a comment where a stream has been silent.
  void check_deadline(Clock::time_point now);

  void set_gone(std::uint64_t serial, std::function<void()> gone);
  // Tells the request in progress to end, as if its client had left. A reply to it is still sent.
  void cancel() noexcept;
  // Closes, and cancels the request in progress.
  void close() noexcept;

  // Calls a function. If it throws, the request in progress ends with status 503, or the connection ends. The other
  // connections continue.
  template <class F>
  void guard(const F& f) noexcept {
    const auto self = weak_from_this().lock();
    try {
      f();
    } catch (...) {
      fail();
    }
  }

  bool busy() const { return phase_ == Phase::handling || !out_.empty(); }
  bool parsing() const { return parsing_; }  // proceed() is running and need not be called

 protected:
  // The socket calls these functions when a read or a write has ended. They throw nothing.
  void received(bool failed, std::size_t bytes);
  void written(bool failed);

  virtual void start_read(std::span<char> room) = 0;
  virtual void start_write(std::string_view bytes) = 0;
  virtual void close_sending() = 0;  // after the last byte
  virtual void close_socket() = 0;

 private:
  enum class Phase { idle, header, body, handling, refused, draining, closed };

  void parse();
  void parsed_header();
  void parsed_body();
  void refuse(HttpReply reply);
  void refuse_bytes(const boost::beast::error_code& error);
  void count_body();
  std::string header_of(const HttpReply& reply, bool events);
  void fail() noexcept;
  void finish();
  void read_more();
  void write_more();
  bool current(std::uint64_t serial) const { return phase_ == Phase::handling && serial == serial_; }

  ConnectionHost& host_;
  std::shared_ptr<RequestHold> held_;  // of the request whose body is read, or that is handled
  Phase phase_ = Phase::idle;
  std::array<char, 8 << 10> room_;  // for the read in progress
  boost::beast::flat_buffer in_;    // received, not yet parsed
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  HttpRequest request_;
  std::string allowed_origin_;
  std::uint64_t serial_ = 0;
  std::function<void()> gone_;
  SendQueue out_;
  RequestHold unsent_;  // events that are not sent
  std::size_t header_bytes_ = 0, drained_ = 0;
  bool reading_ = false, parsing_ = false, keep_alive_ = true, chunked_ = false, events_ = false, head_only_ = false,
       ended_ = false;
  Clock::time_point read_deadline_, write_deadline_ = Clock::time_point::max(), last_write_;
};

}  // namespace efla::serve
