#include "efla/serve/http/connection.h"

#include <boost/beast/http/error.hpp>
#include <boost/beast/http/rfc7230.hpp>

#include <algorithm>
#include <charconv>

#include "efla/serve/http/syntax.h"

namespace efla::serve {
namespace {

namespace http = boost::beast::http;

constexpr std::size_t kPiece = SendQueue::kPiece;  // bytes of a body per timeout
constexpr std::size_t kMostDrained = 1 << 20;      // bytes of a refused body
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

HttpReply unavailable(std::string_view message) {
  auto reply = error_reply(503, message);
  reply.fields.emplace_back("Retry-After: 1");
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
  guard([&] {
    if (phase_ == Phase::closed) return;
    if (failed) {
      ended_ = true;
      // A reply on its way still arrives where the client closed only its own direction.
      if (phase_ == Phase::handling || out_.empty()) return close();
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
  });
}

void Connection::proceed() {
  const auto self = shared_from_this();
  parsing_ = true;
  guard([&] { parse(); });
  parsing_ = false;
  guard([&] {
    write_more();
    read_more();
  });
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
      held_ = std::make_shared<RequestHold>(host_.request_bytes, host_.options.request_memory);
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
  request_.api_key = text(message["x-api-key"]);
  request_.content_type = text(message[http::field::content_type]);
  request_.content_encoding = text(message[http::field::content_encoding]);
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
    return refuse(error_reply(400, "a request of HTTP/1.1 needs the header Host"));
  }
  if (request_.method == "OPTIONS" && !allowed_origin_.empty()) {
    return refuse(preflight_reply(text(message[http::field::access_control_request_headers])));
  }
  if (auto reply = host_.check(request_)) return refuse(std::move(*reply));
  const auto expect = message[http::field::expect];
  if (!parser_->is_done() && boost::beast::iequals(expect, "100-continue"))
    out_.append("HTTP/1.1 100 Continue\r\n\r\n");
}

// Counts the bytes of the body. Refuses the request if all requests then hold more than request_memory.
void Connection::count_body() {
  const auto size = parser_->get().body().size(), before = held_->bytes();
  if (size == before) return;
  if (size / kPiece != before / kPiece) read_deadline_ = Clock::now() + host_.options.timeout;
  try {
    held_->add(static_cast<std::ptrdiff_t>(size - before));
  } catch (const NoRequestMemory& error) {
    refuse(unavailable(error.sentence()));
  }
}

void Connection::parsed_body() {
  request_.body = std::move(parser_->get().body());
  parser_.reset();
  phase_ = Phase::handling;
  events_ = false;
  read_deadline_ = Clock::time_point::max();
  host_.handle(std::move(request_), host_.exchange(*this, ++serial_, held_));
}

// Replies to a request whose body has not been read. The connection closes afterwards if there is a body.
void Connection::refuse(HttpReply reply) {
  const bool more = !parser_->is_done();
  if (more) keep_alive_ = false;
  auto head = header_of(reply, false);
  out_.append(std::move(head), head_only_ ? std::string() : std::move(reply.body), nullptr);
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

std::string Connection::header_of(const HttpReply& reply, bool events) {
  ++host_.replies[reply.status];
  std::string text = chunked_ ? "HTTP/1.1 " : "HTTP/1.0 ";
  text += std::to_string(reply.status);
  text += ' ';
  text += reason(reply.status);
  if (reply.status != 204) {
    text += "\r\nContent-Type: ";
    text += reply.type;
  }
  if (events) {
    if (chunked_) text += "\r\nTransfer-Encoding: chunked";
    if (!chunked_) keep_alive_ = false;
    text += "\r\nCache-Control: no-store\r\nX-Accel-Buffering: no";
  } else if (reply.status != 204) {
    text += "\r\nContent-Length: ";
    text += std::to_string(reply.body.size());
  }
  for (const auto& field : reply.fields) {
    text += "\r\n";
    text += field;
  }
  if (!host_.options.cors_origins.empty()) text += "\r\nVary: Origin";
  if (!allowed_origin_.empty()) {
    text += "\r\nAccess-Control-Allow-Origin: " + allowed_origin_ + "\r\nAccess-Control-Expose-Headers: Retry-After";
  }
  if (host_.stopping) keep_alive_ = false;
  if (!keep_alive_) {
    text += "\r\nConnection: close";
  } else if (!chunked_) {
    text += "\r\nConnection: keep-alive";
  }
  text += "\r\n\r\n";
  return text;
}

void Connection::reply(std::uint64_t serial, HttpReply reply) {
  if (!current(serial) || events_) return;
  auto head = header_of(reply, false);
  out_.append(std::move(head), head_only_ ? std::string() : std::move(reply.body), held_);
  finish();
}

void Connection::begin_events(std::uint64_t serial) {
  if (!current(serial) || events_) return;
  out_.append(header_of({.type = "text/event-stream"}, true));
  events_ = true;
  last_write_ = Clock::now();
}

void Connection::write(std::uint64_t serial, std::string_view events) {
  if (!current(serial) || !events_ || events.empty()) return;
  if (out_.size() > host_.options.max_unsent_bytes) return close();
  std::string text;
  text.reserve(events.size() + 20);
  if (chunked_) {
    append_hex(text, events.size());
    text += "\r\n";
  }
  text += events;
  if (chunked_) text += "\r\n";
  const auto bytes = static_cast<std::ptrdiff_t>(text.size());
  unsent_.add(bytes);
  out_.append(std::move(text));
}

void Connection::end(std::uint64_t serial) {
  if (!current(serial)) return;
  if (!events_) return abandon(serial);  // without memory for their begin
  if (chunked_) out_.append("0\r\n\r\n");
  finish();
}

void Connection::abandon(std::uint64_t serial) {
  if (!current(serial)) return;
  if (events_) return close();
  reply(serial, unavailable("the server could not answer the request: it stops, or has not enough memory"));
}

// Answers the request in progress with status 503 if no byte of its reply is sent yet. Otherwise closes the connection.
void Connection::fail() noexcept {
  try {
    const bool read = phase_ == Phase::header || phase_ == Phase::body;
    if (read || (phase_ == Phase::handling && !events_)) {
      if (read) {
        keep_alive_ = false;
        if (phase_ == Phase::header) chunked_ = true;
        refuse(unavailable("not enough memory"));
      } else {
        reply(serial_, unavailable("not enough memory"));
      }
      if (!parsing_) write_more();
      return;
    }
  } catch (...) {  // not even memory for the error
  }
  close();
}

// Makes way for the next request, or for the end of the connection.
void Connection::finish() {
  gone_ = nullptr;
  held_.reset();
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
  if (phase_ == Phase::closed || out_.writing()) return;
  if (!out_.empty()) {
    last_write_ = Clock::now();
    write_deadline_ = last_write_ + host_.options.timeout;
    return start_write(out_.begin_write());
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
  guard([&] {
    if (phase_ == Phase::closed) return;
    if (failed) return close();
    out_.written();
    if (unsent_.bytes() > out_.size()) unsent_.add(static_cast<std::ptrdiff_t>(out_.size() - unsent_.bytes()));
    if (!out_.empty()) return write_more();
    write_deadline_ = Clock::time_point::max();
    proceed();
  });
}

void Connection::check_deadline(Clock::time_point now) {
  if (held_ && held_->abandoned()) {
    abandon(serial_);
    return proceed();
  }
  const bool written = out_.empty();
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
  if (!current(serial)) return tell(gone);
  gone_ = std::move(gone);
}

void Connection::cancel() noexcept {
  if (held_) held_->set_gone();
  tell(std::exchange(gone_, nullptr));
}

void Connection::close() noexcept {
  if (phase_ == Phase::closed) return;
  const auto self = weak_from_this().lock();
  phase_ = Phase::closed;
  cancel();
  held_.reset();
  unsent_.add(-static_cast<std::ptrdiff_t>(unsent_.bytes()));
  close_socket();
  host_.closed(*this);
}

}  // namespace efla::serve
