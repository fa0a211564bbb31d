#include "efla/serve/http/http.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>

#include "efla/base/error.h"
#include "efla/serve/http/connection.h"
#include "efla/serve/http/exchange.h"

namespace efla::serve {
namespace {

namespace asio = boost::asio;
using asio::generic::stream_protocol;
using boost::beast::error_code;

constexpr std::chrono::milliseconds kSweep{250};     // how late a deadline may be noticed
constexpr std::chrono::milliseconds kPause{10};      // after an error of the server's thread
constexpr std::chrono::milliseconds kCancel{2'000};  // for the replies of requests that the end of the grace cancels

// A connection with its socket, which may be wrapped in TLS.
template <class Stream>
class SocketConnection : public Connection {
 public:
  template <class... Arguments>
  SocketConnection(ConnectionHost& host, Arguments&&... arguments)
      : Connection(host), stream_(std::forward<Arguments>(arguments)...) {}

  void open() {
    if constexpr (kTls) {
      stream_.async_handshake(asio::ssl::stream_base::server,
                              [self = own()](error_code error) { error ? self->close() : self->begin(); });
    } else {
      begin();
    }
  }

 private:
  static constexpr bool kTls = !std::is_same_v<Stream, stream_protocol::socket>;

  std::shared_ptr<SocketConnection> own() { return std::static_pointer_cast<SocketConnection>(shared_from_this()); }

  void start_read(std::span<char> room) override {
    stream_.async_read_some(asio::buffer(room.data(), room.size()),
                            [self = own()](error_code error, std::size_t n) { self->received(bool(error), n); });
  }
  void start_write(std::string_view bytes) override {
    asio::async_write(stream_, asio::buffer(bytes.data(), bytes.size()),
                      [self = own()](error_code error, std::size_t) { self->written(bool(error)); });
  }
  void close_sending() override {
    if constexpr (kTls) {
      stream_.async_shutdown([self = own()](error_code) { self->shut(); });
    } else {
      shut();
    }
  }
  void shut() {
    error_code ignored;
    stream_.lowest_layer().shutdown(asio::socket_base::shutdown_send, ignored);
  }
  void close_socket() override {
    error_code ignored;
    stream_.lowest_layer().close(ignored);
  }

  Stream stream_;
};

}  // namespace

class HttpServer::Implementation {
 public:
  Implementation(const HttpOptions& options, Check check, Handle handle) : acceptor_(io_), signals_(io_), sweep_(io_) {
    host_.options = options;
    host_.check = std::move(check);
    host_.handle = std::move(handle);
    host_.exchange = [this](Connection& connection, std::uint64_t serial, std::shared_ptr<RequestHold> hold) {
      return std::make_shared<Exchange>(mailbox_, connection, serial, std::move(hold));
    };
    if (options.request_memory < options.max_body_bytes) {
      throw Error("serve", "request_memory", std::to_string(options.request_memory),
                  "at least the " + std::to_string(options.max_body_bytes) + " bytes of the largest body");
    }
    host_.closed = [this](Connection& connection) {
      connections_.erase(connection.shared_from_this());
      open_ = static_cast<std::int64_t>(connections_.size());
      if (!accepting_) accept();
    };
    if (!options.tls_certificate.empty() || !options.tls_key.empty()) load_certificate();
    if (options.catch_signals) catch_signals();
    if (options.unix_socket.empty()) {
      listen_tcp();
    } else {
      listen_unix();
    }
  }

  ~Implementation() {
    for (auto* workers : {&quick_, &slow_}) workers->stop();
    for (auto* workers : {&quick_, &slow_}) workers->join();
    mailbox_->close();
    mailbox_->use_this_thread();
    for (const auto& connection : std::vector(connections_.begin(), connections_.end())) connection->close();
    if (!host_.options.unix_socket.empty()) ::unlink(host_.options.unix_socket.c_str());
  }

  void run(std::function<void()> signalled) {
    mailbox_->use_this_thread();
    if (signalled) {
      signalled_ = std::move(signalled);
      catch_signals();
    }
    // Connections handle their own exceptions. Any other one, such as a timer for which there is no memory, ends
    // io_.run(), which is then called again.
    for (bool ended = false; !ended;) {
      try {
        if (signalled_ && !awaiting_signal_) await_signal();
        if (!accepting_) accept();
        sweep();
        io_.run();
        ended = true;
      } catch (const std::exception&) {
        std::this_thread::sleep_for(kPause);
      }
    }
  }

  void work(Lane lane, std::function<void()> task) {
    asio::post(lane == Lane::quick ? quick_ : slow_, [task = std::move(task)] {
      try {
        task();
      } catch (...) {  // the request has ended without a reply, which the connection notices
      }
    });
  }

  void after(std::chrono::milliseconds time, std::function<void()> task) {
    auto timer = std::make_shared<asio::steady_timer>(io_, time);
    timer->async_wait([timer, task = std::move(task)](error_code error) {
      if (!error) task();
    });
  }

  void stop(std::chrono::milliseconds grace) {
    asio::post(io_, [this, grace] {
      host_.stopping = true;
      stop_at_ = std::min(stop_at_, Clock::now() + grace);
      end_if_idle();
    });
  }

  const std::string& address() const { return address_; }
  std::int64_t connections() const { return open_; }
  std::int64_t request_bytes() const { return static_cast<std::int64_t>(*host_.request_bytes); }
  const std::map<int, std::uint64_t>& replies() const { return host_.replies; }

 private:
  void load_certificate() {
    const auto& options = host_.options;
    if (options.tls_certificate.empty() || options.tls_key.empty()) {
      const bool key = options.tls_certificate.empty();
      throw Error("serve", key ? "tls_certificate" : "tls_key", "none",
                  std::string("a PEM file, because there is a ") + (key ? "key" : "certificate"));
    }
    for (const std::string& file : {options.tls_certificate, options.tls_key}) {
      if (::access(file.c_str(), R_OK) == 0) continue;  // OpenSSL's errors do not say why a file cannot be opened
      throw IoError(IoError::Kind::missing, file, -1, "cannot open it: " + std::generic_category().message(errno));
    }
    tls_ = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_server);
    tls_->set_options(asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 |
                      asio::ssl::context::no_tlsv1_1);
    error_code error;
    tls_->use_certificate_chain_file(options.tls_certificate, error);
    if (error) {
      throw Error("serve", "tls_certificate", options.tls_certificate + " (" + error.message() + ")",
                  "a PEM file with a chain of certificates");
    }
    tls_->use_private_key_file(options.tls_key, asio::ssl::context::pem, error);
    if (error) {
      throw Error("serve", "tls_key", options.tls_key + " (" + error.message() + ")",
                  "a PEM file with the certificate's key");
    }
  }

  void listen(const stream_protocol::endpoint& endpoint, const char* argument, const std::string& what) {
    error_code error;
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error == boost::system::errc::address_not_available) refuse_host(error);
    if (error)
      throw Error("serve", argument, what + " (" + error.message() + ")", "an address that can be listened on");
  }

  [[noreturn]] void refuse_host(error_code error) const {
    throw Error("serve", "host", host_.options.host + " (" + error.message() + ")",
                "a name or an address of this machine");
  }

  void listen_tcp() {
    const auto& options = host_.options;
    if (options.port < 0 || options.port > 65535) {
      throw Error("serve", "port", std::to_string(options.port), "0 (any free port) to 65535");
    }
    error_code error;
    asio::ip::tcp::resolver resolver(io_);
    const auto found =
        resolver.resolve(options.host, std::to_string(options.port), asio::ip::tcp::resolver::numeric_service, error);
    if (error || found.empty()) refuse_host(error);
    const auto endpoint = found.begin()->endpoint();
    listen(endpoint, "port", options.host + ":" + std::to_string(options.port));
    const auto local = acceptor_.local_endpoint();
    const auto port = local.data()->sa_family == AF_INET6
                          ? ntohs(reinterpret_cast<const sockaddr_in6*>(local.data())->sin6_port)
                          : ntohs(reinterpret_cast<const sockaddr_in*>(local.data())->sin_port);
    const auto host = options.host.find(':') == std::string::npos ? options.host : "[" + options.host + "]";
    address_ = (tls_ ? "https://" : "http://") + host + ":" + std::to_string(port);
  }

  void listen_unix() {
    const auto& path = host_.options.unix_socket;
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      throw Error("serve", "unix_socket", path,
                  "a path of less than " + std::to_string(sizeof(sockaddr_un::sun_path)) + " bytes");
    }
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0 && S_ISSOCK(status.st_mode)) {
      error_code error;
      asio::local::stream_protocol::socket probe(io_);
      probe.connect(path, error);
      if (!error) throw Error("serve", "unix_socket", path + ", which a program listens on", "a free path");
      ::unlink(path.c_str());
    }
    listen(asio::local::stream_protocol::endpoint(path), "unix_socket", path);
    address_ = "unix:" + path;
  }

  // Waits for the next connection, unless there are too many. sweep() tries again where there is no memory for it.
  void accept() noexcept try {
    accepting_ = false;
    if (connections_.size() >= host_.options.max_connections || !acceptor_.is_open()) return;
    acceptor_.async_accept([this](error_code error, stream_protocol::socket socket) {
      if (error == asio::error::operation_aborted) return;
      accepting_ = false;
      if (error) return;  // for example too many open files: sweep() tries again
      accepted(std::move(socket));
      accept();
    });
    accepting_ = true;
  } catch (const std::exception&) {
  }

  void accepted(stream_protocol::socket socket) noexcept try {
    error_code ignored;
    if (host_.options.unix_socket.empty()) socket.set_option(asio::ip::tcp::no_delay(true), ignored);
    if (tls_) {
      add(std::make_shared<SocketConnection<asio::ssl::stream<stream_protocol::socket>>>(host_, std::move(socket),
                                                                                         *tls_));
    } else {
      add(std::make_shared<SocketConnection<stream_protocol::socket>>(host_, std::move(socket)));
    }
  } catch (const std::exception&) {  // no memory for one more connection, which ends
  }

  template <class Added>
  void add(const std::shared_ptr<Added>& connection) {
    connections_.insert(connection);
    open_ = static_cast<std::int64_t>(connections_.size());
    connection->guard([&] { connection->open(); });
  }

  void catch_signals() {
    signals_.add(SIGINT);
    signals_.add(SIGTERM);
  }

  void await_signal() {
    signals_.async_wait([this](error_code error, int) {
      awaiting_signal_ = false;
      if (error) return;
      signalled_();
      await_signal();
    });
    awaiting_signal_ = true;
  }

  void sweep() {
    sweep_.expires_after(kSweep);
    sweep_.async_wait([this](error_code error) {
      if (error) return;
      const auto now = Clock::now();
      if (!accepting_) accept();
      for (const auto& connection : std::vector(connections_.begin(), connections_.end())) {
        connection->guard([&] { connection->check_deadline(now); });
      }
      if (host_.stopping) end_if_idle();
      sweep();
    });
  }

  // Ends run() once a stopping server owes no reply. After the grace cancels the requests that are left, and closes
  // their connections when they are answered or kCancel is over.
  void end_if_idle() {
    const auto now = Clock::now();
    const bool late = now >= stop_at_;
    for (const auto& connection : std::vector(connections_.begin(), connections_.end())) {
      if (!connection->busy() || (late && now - stop_at_ >= kCancel)) {
        connection->close();
      } else if (late) {
        connection->cancel();
      }
    }
    if (connections_.empty()) io_.stop();
  }

  asio::io_context io_{1};
  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>(io_);
  ConnectionHost host_;
  std::unique_ptr<asio::ssl::context> tls_;
  asio::basic_socket_acceptor<stream_protocol> acceptor_;
  asio::signal_set signals_;
  asio::steady_timer sweep_;
  asio::thread_pool quick_{1}, slow_{1};
  std::function<void()> signalled_;
  std::unordered_set<std::shared_ptr<Connection>> connections_;
  std::atomic<std::int64_t> open_ = 0;
  std::string address_;
  Clock::time_point stop_at_ = Clock::time_point::max();
  bool accepting_ = false, awaiting_signal_ = false;
};

HttpServer::HttpServer(const HttpOptions& options, Check check, Handle handle)
    : implementation_(std::make_unique<Implementation>(options, std::move(check), std::move(handle))) {}
HttpServer::~HttpServer() = default;
const std::string& HttpServer::address() const { return implementation_->address(); }
void HttpServer::run(std::function<void()> signalled) { implementation_->run(std::move(signalled)); }
void HttpServer::work(Lane lane, std::function<void()> task) { implementation_->work(lane, std::move(task)); }
void HttpServer::after(std::chrono::milliseconds time, std::function<void()> task) {
  implementation_->after(time, std::move(task));
}
void HttpServer::stop(std::chrono::milliseconds grace) { implementation_->stop(grace); }
std::int64_t HttpServer::connections() const { return implementation_->connections(); }
std::int64_t HttpServer::request_bytes() const { return implementation_->request_bytes(); }
const std::map<int, std::uint64_t>& HttpServer::replies() const { return implementation_->replies(); }

}  // namespace efla::serve
