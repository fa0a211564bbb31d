// A client of a server on 127.0.0.1 that sends any bytes, also such as no honest client sends.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>

namespace efla::test {

class HttpClient {
 public:
  explicit HttpClient(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connect(AF_INET, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  explicit HttpClient(const std::string& unix_socket) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    unix_socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
    connect(AF_UNIX, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  ~HttpClient() { close(); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  void close_sending() { ::shutdown(socket_, SHUT_WR); }

  // Returns whether the server took all bytes.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  // Returns what came up to and including `mark`, or all that came before the end or the time limit.
  std::string read_until(std::string_view mark, double seconds = 10.0) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      if (const auto at = mark.empty() ? std::string::npos : held_.find(mark); at != std::string::npos) {
        return take(at + mark.size());
      }
      const std::chrono::duration<double> left = deadline - std::chrono::steady_clock::now();
      if (!receive(left.count())) return take(held_.size());
    }
  }
  std::string read_all(double seconds = 10.0) { return read_until("", seconds); }
  bool ended() const { return ended_; }  // the server closed

  // Sends a request and returns the reply, header and body.
  std::string ask(std::string_view request) {
    send(request);
    return read_reply();
  }
  std::string get(const std::string& path) { return ask("GET " + path + " HTTP/1.1\r\nHost: test\r\n\r\n"); }
  std::string post(const std::string& path, const std::string& body, const std::string& fields = "") {
    send_post(path, body, fields);
    return read_reply();
  }
  void send_post(const std::string& path, const std::string& body, const std::string& fields = "") {
    send("POST " + path + " HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n" + fields +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  }

  std::string read_reply() {
    auto reply = read_until("\r\n\r\n");
    if (const auto at = reply.find("Content-Length: "); at != std::string::npos) {
      const auto size = std::stoul(reply.substr(at + 16));
      while (held_.size() < size && receive(10.0)) {
      }
      reply += take(size);
    } else if (reply.find("Transfer-Encoding: chunked") != std::string::npos) {
      reply += read_until("\r\n0\r\n\r\n");
    }
    return reply;
  }

 private:
  // Waits for more bytes. Returns false at the end and after the time.
  bool receive(double seconds) {
    pollfd event{socket_, POLLIN, 0};
    if (ended_ || seconds <= 0 || ::poll(&event, 1, static_cast<int>(seconds * 1e3) + 1) <= 0) return false;
    char bytes[16384];
    const auto size = ::recv(socket_, bytes, sizeof(bytes), 0);
    ended_ = size <= 0;
    if (!ended_) held_.append(bytes, static_cast<std::size_t>(size));
    return !ended_;
  }
  void connect(int family, const sockaddr* address, socklen_t size) {
    socket_ = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket_ < 0 || ::connect(socket_, address, size) != 0) throw std::runtime_error("no connection");
  }
  std::string take(std::size_t size) {
    auto taken = held_.substr(0, size);
    held_.erase(0, size);
    return taken;
  }

  int socket_ = -1;
  bool ended_ = false;
  std::string held_;
};

// Returns the body of a reply with the chunks of "Transfer-Encoding: chunked" joined.
inline std::string body_of(const std::string& reply) {
  const auto header = reply.find("\r\n\r\n");
  if (header == std::string::npos) return "";
  std::string_view rest = std::string_view(reply).substr(header + 4);
  if (reply.substr(0, header).find("chunked") == std::string::npos) return std::string(rest);
  std::string body;
  while (!rest.empty()) {
    const auto size = std::stoul(std::string(rest.substr(0, rest.find("\r\n"))), nullptr, 16);
    rest.remove_prefix(rest.find("\r\n") + 2);
    body += rest.substr(0, size);
    rest.remove_prefix(std::min(size + 2, rest.size()));
  }
  return body;
}

inline int status_of(const std::string& reply) {
  return reply.starts_with("HTTP/1.") && reply.size() > 12 ? std::stoi(reply.substr(9, 3)) : 0;
}

}  // namespace efla::test
