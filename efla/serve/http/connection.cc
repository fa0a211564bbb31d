#include "efla/serve/http/connection.h"

#include <boost/beast/http/error.hpp>
#include <boost/beast/http/rfc7230.hpp>

#include <algorithm>
#include <charconv>

#include "efla/serve/http/syntax.h"

namespace efla::serve {
namespace {

namespace http = boost::beast::http;

constexpr std::size_t kPiece = 64 << 10;       // bytes of a body per timeout
constexpr std::size_t kMostDrained = 1 << 20;  // bytes of a refused body
constexpr std::chrono::seconds kDrainTime{2};

std::string_view reason(int status) {
  const auto text = http::obsolete_reason(static_cast<http::status>(status));
  return {text.data(), text.size()};
}

std::string text(boost::beast::string_view view) { return {view.data(), view.size()}; }

void append_hex(std::string& out, std::size_t value) {
  char digits[16];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value, 16).ptr;
  out.append(digits, end);
}

HttpReply error_reply(int status, std::string_view message) {
  HttpReply reply{.status = status};
  reply.body = R"({"error":{"message":")" + std::string(message) +
               R"(","type":"invalid_request_error","param":null,"code":null}})";
  return reply;
}

// Returns the reply to a browser that asks whether a page may send a request with some header fields: "a, b", or "" for
// none. What is not a list of names counts as none.
HttpReply preflight_reply(std::string_view fields) {
  const bool names = http::validate_list(http::opt_token_list({fields.data(), fields.size()}));
  HttpReply reply{.status = 204};
  reply.fields = {"Access-Control-Allow-Methods: GET, POST, PUT, DELETE", "Access-Control-Max-Age: 600"};
  if (!fields.empty() && names) reply.fields.push_back("Access-Control-Allow-Headers: " + std::string(fields));
  return reply;
}

}  // namespace

void Connection::begin() { read_more(); }

void Connection::received(bool failed, std::size_t bytes) {
  reading_ = false;
  if (phase_ == Phase::closed) return;
  if (failed) {
    ended_ = true;
    // A reply on its way still arrives where the client closed only its own direction.
    if (phase_ == Phase::handling || (out_.empty() && writing_.empty())) return close();
    keep_alive_ = false;
    phase_ = Phase::refused;
    return;
  }
  if (phase_ == Phase::draining) {
    drained_ += bytes;
    if (drained_ > kMostDrained) return close();
    return read_more();
  }
  in_.commit(boost::asio::buffer_copy(in_.prepare(bytes), boost::asio::buffer(room_, bytes)));
  proceed();
}

void Connection::proceed() {
  const auto self = shared_from_this();
  parsing_ = true;
  parse();
  parsing_ = false;
  write_more();
  read_more();
}

// Feeds the parser with what was read, until a request is complete, more bytes are needed, or a client that sends
// requests does not read the replies.
void Connection::parse() {
  while ((phase_ == Phase::idle || phase_ == Phase::header || phase_ == Phase::body) && in_.size() > 0 &&
         out_.size() < kPiece) {
    if (phase_ == Phase::idle) {
      parser_.emplace();
      parser_->header_limit(static_cast<std::uint32_t>(host_.options.max_header_bytes));
      parser_->body_limit(host_.options.max_body_bytes);
      request_ = {};
      header_bytes_ = 0;
      phase_ = Phase::header;
      read_deadline_ = Clock::now() + host_.options.timeout;
    }
    boost::beast::error_code error;
    const auto consumed = parser_->put(in_.data(), error);
    in_.consume(consumed);
    if (phase_ == Phase::header) header_bytes_ += consumed;  // Beast limits each field alone
    if (header_bytes_ > host_.options.max_header_bytes) error = http::error::header_limit;
    if (error && error != http::error::need_more) return refuse_bytes(error);
    if (phase_ == Phase::header && parser_->is_header_done()) parsed_header();
    if (phase_ == Phase::body) count_body();
    if (phase_ == Phase::body && parser_->is_done()) parsed_body();
    if (error == http::error::need_more) return;
  }
}

void Connection::parsed_header() {
  const auto& message = parser_->get();
  request_.method = text(message.method_string());
  const std::string_view target(message.target().data(), message.target().size());
  request_.path = path_of(target);
  request_.query = query_of(target);
  request_.authorization = text(message[http::field::authorization]);
  request_.content_type = text(message[http::field::content_type]);
  keep_alive_ = message.keep_alive() && !host_.stopping;
  chunked_ = message.version() >= 11;
  head_only_ = request_.method == "HEAD";
  const auto origin = text(message[http::field::origin]);
  allowed_origin_.clear();
  for (const auto& allowed : host_.options.cors_origins) {
    if (!origin.empty() && (allowed == "*" || allowed == origin)) allowed_origin_ = allowed;
  }
  phase_ = Phase::body;
  read_deadline_ = Clock::now() + host_.options.timeout;
  if (message.version() >= 11 && message.find(http::field::host) == message.end()) {
  request_.content_encoding = text(message[http::field::content_encoding]);
    return refuse(error_reply(400, "a request of HTTP/1.1 needs the header Host"));
  }
  if (request_.method == "OPTIONS" && !allowed_origin_.empty()) {
    return refuse(preflight_reply(text(message[http::field::access_control_request_headers])));
  }
  if (auto reply = host_.check(request_)) return refuse(std::move(*reply));
  const auto expect = message[http::field::expect];
  if (!parser_->is_done() && boost::beast::iequals(expect, "100-continue")) out_ += "HTTP/1.1 100 Continue\r\n\r\n";
}

// Counts the bytes of the body. Refuses the request if the bodies of all requests exceed request_memory.
void Connection::count_body() {
  const auto size = parser_->get().body().size();
  if (size == body_.get()) return;
  if (size / kPiece != body_.get() / kPiece) read_deadline_ = Clock::now() + host_.options.timeout;
  body_.set(size);
  if (*host_.body_bytes > host_.options.request_memory) {
    auto reply = error_reply(503, "the bodies of the requests that wait and run take all the memory for requests");
    reply.fields.emplace_back("Retry-After: 1");
    refuse(std::move(reply));
  }
}

void Connection::parsed_body() {
  request_.body = std::move(parser_->get().body());
  parser_.reset();
  phase_ = Phase::handling;
  events_ = false;
  read_deadline_ = Clock::time_point::max();
  host_.handle(std::move(request_), host_.exchange(*this, ++serial_, std::move(body_)));
}

// Replies to a request whose body has not been read. The connection closes afterwards if there is a body.
void Connection::refuse(HttpReply reply) {
  const bool more = !parser_->is_done();
  if (more) keep_alive_ = false;
  append_header(reply, false);
  if (!head_only_) out_ += reply.body;
  parser_.reset();
  finish();
}

void Connection::refuse_bytes(const boost::beast::error_code& error) {
  keep_alive_ = false;
  chunked_ = true;
  head_only_ = false;
  allowed_origin_.clear();
  if (error == http::error::header_limit) {
    refuse(error_reply(
        431, "the request's header is longer than " + std::to_string(host_.options.max_header_bytes) + " bytes"));
  } else if (error == http::error::body_limit) {
    refuse(error_reply(413,
                       "the request's body is longer than " + std::to_string(host_.options.max_body_bytes) + " bytes"));
  } else {
    refuse(error_reply(400, "not a request of HTTP/1.1: " + error.message()));
  }
}

void Connection::append_header(const HttpReply& reply, bool events) {
  ++host_.replies[reply.status];
  out_ += chunked_ ? "HTTP/1.1 " : "HTTP/1.0 ";
  out_ += std::to_string(reply.status);
  out_ += ' ';
  out_ += reason(reply.status);
  if (reply.status != 204) {
    out_ += "\r\nContent-Type: ";
    out_ += reply.type;
  }
  if (events) {
    if (chunked_) out_ += "\r\nTransfer-Encoding: chunked";
    if (!chunked_) keep_alive_ = false;
    out_ += "\r\nCache-Control: no-store\r\nX-Accel-Buffering: no";
  } else if (reply.status != 204) {
    out_ += "\r\nContent-Length: ";
    out_ += std::to_string(reply.body.size());
  }
  for (const auto& field : reply.fields) {
    out_ += "\r\n";
    out_ += field;
  }
  if (!host_.options.cors_origins.empty()) out_ += "\r\nVary: Origin";
  if (!allowed_origin_.empty()) {
    out_ += "\r\nAccess-Control-Allow-Origin: " + allowed_origin_ + "\r\nAccess-Control-Expose-Headers: Retry-After";
  }
  if (host_.stopping) keep_alive_ = false;
  if (!keep_alive_) {
    out_ += "\r\nConnection: close";
  } else if (!chunked_) {
    out_ += "\r\nConnection: keep-alive";
  }
  out_ += "\r\n\r\n";
}

void Connection::reply(std::uint64_t serial, HttpReply reply) {
  if (!current(serial) || events_) return;
  append_header(reply, false);
  if (!head_only_) out_ += reply.body;
  finish();
}

void Connection::begin_events(std::uint64_t serial) {
  if (!current(serial) || events_) return;
  append_header({.type = "text/event-stream"}, true);
  events_ = true;
  last_write_ = Clock::now();
}

void Connection::write(std::uint64_t serial, std::string_view events) {
  if (!current(serial) || !events_ || events.empty()) return;
  if (out_.size() + writing_.size() - write_begin_ > host_.options.max_unsent_bytes) return close();
  if (chunked_) {
    append_hex(out_, events.size());
    out_ += "\r\n";
  }
  out_ += events;
  if (chunked_) out_ += "\r\n";
}

void Connection::end(std::uint64_t serial) {
  if (!current(serial) || !events_) return;
  if (chunked_) out_ += "0\r\n\r\n";
  finish();
}

void Connection::abandon(std::uint64_t serial) {
  if (!current(serial)) return;
  if (events_) return close();
  reply(serial, error_reply(500, "the request ended without a reply"));
}

// Makes way for the next request, or for the end of the connection.
void Connection::finish() {
  gone_ = nullptr;
  body_.set(0);
  phase_ = keep_alive_ ? Phase::idle : Phase::refused;
  read_deadline_ = Clock::now() + host_.options.idle_timeout;
}

void Connection::read_more() {
  // Reads while a request is handled too, because only a read tells that the client leaves; not if the buffer is full.
  if (reading_ || ended_ || phase_ == Phase::closed || in_.size() >= host_.options.max_header_bytes) return;
  reading_ = true;
  start_read(room_);
}

void Connection::write_more() {
  if (phase_ == Phase::closed || !writing_.empty()) return;
  if (!out_.empty()) {
    writing_.swap(out_);
    write_begin_ = 0;
    last_write_ = Clock::now();
    write_deadline_ = last_write_ + host_.options.timeout;
    return start_write(std::string_view(writing_).substr(0, kPiece));
  }
  if (phase_ != Phase::refused) return;
  // The last reply is sent. A client that is still sending would lose it if the socket closed now.
  if (ended_) return close();
  phase_ = Phase::draining;
  in_.consume(in_.size());
  read_deadline_ = Clock::now() + kDrainTime;
  close_sending();
}

void Connection::written(bool failed) {
  if (phase_ == Phase::closed) return;
  if (failed) return close();
  write_begin_ += std::min(kPiece, writing_.size() - write_begin_);
  if (write_begin_ < writing_.size()) {
    write_deadline_ = Clock::now() + host_.options.timeout;
    return start_write(std::string_view(writing_).substr(write_begin_, kPiece));
  }
  writing_.clear();
  write_begin_ = 0;
  if (writing_.capacity() > kPiece) writing_ = {};
  write_deadline_ = Clock::time_point::max();
  proceed();
}

void Connection::check_deadline(Clock::time_point now) {
  const bool written = out_.empty() && writing_.empty();
  if (now > write_deadline_) return close();
  if (now > read_deadline_ && (written || phase_ == Phase::draining)) {
    const bool half = phase_ == Phase::header || phase_ == Phase::body;
    if (!half) return close();
    const auto self = shared_from_this();
    keep_alive_ = false;
    chunked_ = true;
    refuse(error_reply(408, "the request took too long to arrive"));
    return write_more();
  }
  if (phase_ == Phase::handling && events_ && written && now - last_write_ > host_.options.ping) {
    write(serial_, ": ping\n\n");
    write_more();
  }
}

void Connection::set_gone(std::uint64_t serial, std::function<void()> gone) {
  if (!current(serial)) return gone();
  gone_ = std::move(gone);
}

void Connection::close() {
  if (phase_ == Phase::closed) return;
  const auto self = shared_from_this();
  phase_ = Phase::closed;
  body_.set(0);
  if (const auto gone = std::exchange(gone_, nullptr)) gone();
  close_socket();
  host_.closed(*this);
}

}  // namespace efla::serve
