// A web server on 127.0.0.1 for tests of downloads. It serves one connection at a time.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace efla::test {

// The reply to requests for a path.
struct Reply {
  std::string body;
  int status = 200;            // 206 is sent instead if the request has a range and ranges is true
  bool ranges = true;          // false: always send everything
  std::size_t cut = SIZE_MAX;  // send this many bytes of the body and close
  int stall_ms = 0;            // wait before the body
};

class HttpServer {
 public:
  HttpServer() {
    // Otherwise a proxy in the environment would get requests for 127.0.0.1.
    ::setenv("no_proxy", "127.0.0.1", 1);
    socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (::bind(socket_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(socket_, 8) != 0 ||
        ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no server on 127.0.0.1");
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~HttpServer() { stop(); }
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Refuses connections from now on.
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }

  std::string url(const std::string& path = "/") const { return "http://127.0.0.1:" + std::to_string(port_) + path; }

  void set(const std::string& path, Reply reply) {
    const std::lock_guard lock(mutex_);
    replies_[path] = std::move(reply);
  }

  // Returns the requests so far, as "/path" or "/path from FIRST".
  std::vector<std::string> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void serve() {
    while (!stopping_) {
      pollfd waiting{socket_, POLLIN, 0};
      if (::poll(&waiting, 1, 10) <= 0) continue;
      const int connection = ::accept(socket_, nullptr, nullptr);
      if (connection < 0) continue;
      answer(connection);
      ::shutdown(connection, SHUT_RDWR);
      ::close(connection);
    }
  }

  void answer(int connection) {
    std::string request;
    char buffer[4096];
    while (request.find("\r\n\r\n") == std::string::npos) {
      const auto n = ::recv(connection, buffer, sizeof(buffer), 0);
      if (n <= 0) return;
      request.append(buffer, static_cast<std::size_t>(n));
    }
    const auto space = request.find(' ');
    const auto path = request.substr(space + 1, request.find(' ', space + 1) - space - 1);
    constexpr std::string_view kRange = "Range: bytes=";
    const auto range = request.find(kRange);
    const auto first = range == std::string::npos ? 0 : std::stoull(request.substr(range + kRange.size()));
    send_all(connection, make_answer(path, first));
  }

  std::string make_answer(const std::string& path, std::size_t first) {
    Reply reply;
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(first > 0 ? path + " from " + std::to_string(first) : path);
      const auto found = replies_.find(path);
      reply = found != replies_.end() ? found->second : Reply{"no such page", 404};
    }
    for (int waited = 0; waited < reply.stall_ms && !stopping_; waited += 10) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::string range_line;
    const auto all = reply.body.size();
    if (first > 0 && reply.ranges && reply.status == 200) {
      reply.status = first < all ? 206 : 416;
      range_line = "Content-Range: bytes " +
                   (first < all ? std::to_string(first) + "-" + std::to_string(all - 1) : "*") + "/" +
                   std::to_string(all) + "\r\n";
      reply.body = first < all ? reply.body.substr(first) : "";
    }
    return "HTTP/1.1 " + std::to_string(reply.status) + " x\r\nContent-Length: " + std::to_string(reply.body.size()) +
           "\r\n" + range_line + "Connection: close\r\n\r\n" + reply.body.substr(0, reply.cut);
  }

  static void send_all(int connection, const std::string& bytes) {
    for (std::size_t sent = 0; sent < bytes.size();) {
      const auto n = ::send(connection, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return;
      sent += static_cast<std::size_t>(n);
    }
  }

  int socket_ = -1;
  int port_ = 0;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::map<std::string, Reply> replies_;
  std::vector<std::string> requests_;
  std::thread thread_;
};

}  // namespace efla::test
