// How other threads reach a connection: an exchange sends messages, which the server's thread applies.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "efla/serve/http/connection.h"

namespace efla::serve {

// What an exchange tells its connection.
struct Message {
  enum class Kind { reply, begin, write, end, gone };
  std::weak_ptr<Connection> connection = {};
  std::uint64_t serial = 0;
  Kind kind = Kind::reply;
  HttpReply reply = {};
  std::string text = {};
  std::function<void()> gone = {};
};

// Messages of any thread, which the server's thread applies together: one wake-up per step of an engine, not per token.
class Mailbox {
 public:
  explicit Mailbox(boost::asio::io_context& io) : io_(&io) {}

  void send(Message message) {
    if (thread_ == std::this_thread::get_id()) {
      const auto connection = apply(message);
      if (connection && io_ != nullptr && !connection->parsing()) connection->proceed();
      return;
    }
    const std::lock_guard lock(mutex_);
    if (io_ == nullptr) return;
    if (messages_.empty())
      boost::asio::post(*io_, [this] { drain(); });  // first: a message without it would wait for ever
    messages_.push_back(std::move(message));
  }

  void use_this_thread() { thread_ = std::this_thread::get_id(); }
  void close() {
    const std::lock_guard lock(mutex_);
    io_ = nullptr;
  }

 private:
  void drain() {
    {
      const std::lock_guard lock(mutex_);
      taken_.swap(messages_);
    }
    for (auto& message : taken_) changed(apply(message));
    taken_.clear();
    for (const auto& connection : std::exchange(changed_, {})) connection->proceed();
  }

  // Notes a connection that has something to send, once per drain. Without memory for the note it sends at once.
  void changed(std::shared_ptr<Connection> connection) {
    if (!connection || (!changed_.empty() && changed_.back() == connection)) return;
    try {
      changed_.push_back(connection);
    } catch (const std::bad_alloc&) {
      connection->proceed();
    }
  }

  // Returns the message's connection, null if it has ended.
  static std::shared_ptr<Connection> apply(Message& message) {
    auto connection = message.connection.lock();
    if (!connection) {
      tell(message.gone);
      return nullptr;
    }
    connection->guard([&] {
      switch (message.kind) {
        case Message::Kind::reply:
          return connection->reply(message.serial, std::move(message.reply));
        case Message::Kind::begin:
          return connection->begin_events(message.serial);
        case Message::Kind::write:
          return connection->write(message.serial, message.text);
        case Message::Kind::end:
          return connection->end(message.serial);
        case Message::Kind::gone:
          return connection->set_gone(message.serial, std::move(message.gone));
      }
    });
    return connection;
  }

  std::mutex mutex_;
  boost::asio::io_context* io_;
  std::atomic<std::thread::id> thread_ = std::thread::id();
  std::vector<Message> messages_, taken_;
  std::vector<std::shared_ptr<Connection>> changed_;
};

class Exchange : public HttpExchange {
 public:
  Exchange(std::shared_ptr<Mailbox> mailbox, Connection& connection, std::uint64_t serial,
           std::shared_ptr<RequestHold> hold)
      : mailbox_(std::move(mailbox)),
        connection_(connection.weak_from_this()),
        serial_(serial),
        hold_(std::move(hold)) {}
  ~Exchange() override {
    if (!over_) hold_->set_abandoned();  // without a message, which would need memory
  }

  bool gone() const override { return hold_->gone(); }
  void hold(std::ptrdiff_t bytes) override {
    if (bytes > 0 && hold_->gone()) throw RequestGone();
    hold_->add(bytes);
  }

  void reply(HttpReply reply) override {
    send({.kind = Message::Kind::reply, .reply = std::move(reply)});
    over_ = true;
  }
  void begin_events() override { send({.kind = Message::Kind::begin}); }
  void write(std::string_view events) override { send({.kind = Message::Kind::write, .text = std::string(events)}); }
  void end() override {
    send({.kind = Message::Kind::end});
    over_ = true;
  }
  void on_gone(std::function<void()> gone) override { send({.kind = Message::Kind::gone, .gone = std::move(gone)}); }

 private:
  void send(Message message) {
    message.connection = connection_;
    message.serial = serial_;
    mailbox_->send(std::move(message));
  }

  std::shared_ptr<Mailbox> mailbox_;
  std::weak_ptr<Connection> connection_;
  std::uint64_t serial_;
  std::shared_ptr<RequestHold> hold_;
  std::atomic<bool> over_ = false;
};

}  // namespace efla::serve
