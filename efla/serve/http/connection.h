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

namespace efla::serve {

using Clock = std::chrono::steady_clock;

class Connection;

// Adds the bytes of one body to the total of all bodies, and subtracts them at its end, on any thread.
class BodyBytes {
 public:
  using Total = std::shared_ptr<std::atomic<std::size_t>>;

  explicit BodyBytes(Total total) : total_(std::move(total)) {}
  BodyBytes(BodyBytes&& other) noexcept : total_(other.total_), bytes_(std::exchange(other.bytes_, 0)) {}
  BodyBytes& operator=(BodyBytes&&) = delete;
  ~BodyBytes() { set(0); }

  void set(std::size_t bytes) {
    *total_ += bytes - bytes_;
    bytes_ = bytes;
  }
  std::size_t get() const { return bytes_; }

 private:
  Total total_;
  std::size_t bytes_ = 0;
};

// What the connections of a server share.
struct ConnectionHost {
  HttpOptions options;
  HttpServer::Check check;
  HttpServer::Handle handle;
  std::function<std::shared_ptr<HttpExchange>(Connection&, std::uint64_t serial, BodyBytes body)> exchange;
  std::function<void(Connection&)> closed;
  std::map<int, std::uint64_t> replies;                                         // by status
  BodyBytes::Total body_bytes = std::make_shared<std::atomic<std::size_t>>(0);  // of bodies that arrive, wait and run
  bool stopping = false;                                                        // answers end with "Connection: close"
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  explicit Connection(ConnectionHost& host)
      : host_(host), body_(host.body_bytes), read_deadline_(Clock::now() + host.options.timeout) {}
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
  void cancel() {
    if (const auto gone = std::exchange(gone_, nullptr)) gone();
  }
  // Closes, and cancels the request in progress.
  void close();

  bool busy() const { return phase_ == Phase::handling || !out_.empty() || !writing_.empty(); }
  bool parsing() const { return parsing_; }  // proceed() is running and need not be called
  bool marked = false;                       // for the server's list of connections to continue

 protected:
  // The socket calls these functions when a read or a write has ended.
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
  void append_header(const HttpReply& reply, bool events);
  void finish();
  void read_more();
  void write_more();
  bool current(std::uint64_t serial) const { return phase_ == Phase::handling && serial == serial_; }

  ConnectionHost& host_;
  BodyBytes body_;  // of the body that is being read
  Phase phase_ = Phase::idle;
  std::array<char, 8 << 10> room_;  // for the read in progress
  boost::beast::flat_buffer in_;    // received, not yet parsed
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  HttpRequest request_;
  std::string allowed_origin_;
  std::uint64_t serial_ = 0;
  std::function<void()> gone_;
  std::string out_, writing_;
  std::size_t write_begin_ = 0;  // bytes of writing_ that were written
  std::size_t header_bytes_ = 0, drained_ = 0;
  bool reading_ = false, parsing_ = false, keep_alive_ = true, chunked_ = false, events_ = false, head_only_ = false,
       ended_ = false;
  Clock::time_point read_deadline_, write_deadline_ = Clock::time_point::max(), last_write_;
};

}  // namespace efla::serve
