#include "efla/serve/chat/template_worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

namespace efla::serve {
namespace {

constexpr int kServerError = 500;

// The number of a message's bytes goes before the message.
constexpr std::size_t kSizeBytes = 4;

std::string size_bytes(std::size_t size) {
  std::string bytes;
  for (std::size_t i = 0; i < kSizeBytes; ++i) bytes += static_cast<char>(size >> (8 * i) & 0xFF);
  return bytes;
}

std::size_t size_of(std::span<const char, kSizeBytes> bytes) {
  std::size_t size = 0;
  for (std::size_t i = 0; i < kSizeBytes; ++i) {
    size |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return size;
}

// Calls move(done) where the socket is ready, until `size` bytes went over. Returns whether they did before the
// deadline.
template <class Move>
bool move_bytes(int socket, short event, std::size_t size, std::chrono::steady_clock::time_point deadline,
                const Move& move) {
  for (std::size_t done = 0; done < size;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd wanted{.fd = socket, .events = event, .revents = 0};
    const int ready = left <= 0 ? 0 : poll(&wanted, 1, static_cast<int>(left));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t moved = move(done);
    if (moved < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);
  }
  return true;
}

// Starts Python with a socket as standard input and output, and nothing else. Returns the process's number; −1: none.
pid_t start_python(int socket) {
  std::string program(template_worker_program());
  char python[] = "python3", isolated[] = "-I", command[] = "-c";
  char* arguments[] = {python, isolated, command, program.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  sigset_t none;
  sigemptyset(&none);
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, socket, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);  // a terminal's Ctrl-C is for the server, which still has replies to end
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  pid_t process = -1;
  const int error = posix_spawnp(&process, python, &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error == 0 ? process : -1;
}

}  // namespace

TemplateWorker::TemplateWorker(std::string_view setup, const WorkerLimits& limits) : limits_(limits) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    throw TemplateError(kServerError, std::string("no socket to the process of chat templates: ") + strerror(errno));
  }
  socket_ = sockets[0];
  process_ = start_python(sockets[1]);
  close(sockets[1]);
  try {
    if (process_ < 0) throw NoPython();
    ended_ = std::async(std::launch::async, [this] { return wait(); });
    reply_ = ask(setup);
  } catch (...) {
    end();
    throw;
  }
}

TemplateWorker::~TemplateWorker() { end(); }

// The process stays a zombie until the lock is held, so that end() signals no other process that has its number.
int TemplateWorker::wait() {
  const auto id = static_cast<id_t>(process_);
  siginfo_t ignored;
  while (waitid(P_PID, id, &ignored, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
  }
  const std::lock_guard lock(mutex_);
  int status = 0;
  waitpid(process_, &status, 0);
  process_ = -1;
  return status;
}

void TemplateWorker::end() {
  if (socket_ >= 0) close(std::exchange(socket_, -1));
  {
    const std::lock_guard lock(mutex_);
    if (process_ >= 0) kill(process_, SIGKILL);
  }
  if (ended_.valid()) status_ = ended_.get();
}

bool TemplateWorker::send_all(std::string_view text, Deadline deadline) const {
  return move_bytes(socket_, POLLOUT, text.size(), deadline, [&](std::size_t done) {
    return send(socket_, text.data() + done, text.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
}

bool TemplateWorker::receive_all(std::span<char> into, Deadline deadline) const {
  return move_bytes(socket_, POLLIN, into.size(), deadline, [&](std::size_t done) {
    return recv(socket_, into.data() + done, into.size() - done, MSG_DONTWAIT);
  });
}

std::string TemplateWorker::ask(std::string_view request) {
  if (request.size() > UINT32_MAX) throw TemplateError(413, "the chat is too long for its template");
  constexpr int kBytesPerTime = 1 << 20, kWallTimes = 10;  // the first as in template_worker.py
  const auto times = 1 + static_cast<int>(request.size() / kBytesPerTime);
  const auto deadline = std::chrono::steady_clock::now() + limits_.wall_time + kWallTimes * times * limits_.time;
  std::array<char, kSizeBytes> head;
  if (send_all(size_bytes(request.size()), deadline) && send_all(request, deadline) && receive_all(head, deadline)) {
    std::string reply(size_of(head), '\0');
    if (receive_all(reply, deadline)) return reply;
  }
  fail(std::chrono::steady_clock::now() >= deadline);
}

void TemplateWorker::fail(bool late) {
  // The socket closes shortly before the process has ended: its status says why.
  constexpr std::chrono::milliseconds kLongestEnd{100};
  if (!late) ended_.wait_for(kLongestEnd);
  end();
  if (late || (WIFSIGNALED(status_) && WTERMSIG(status_) == SIGPROF)) {
    throw TemplateError(400, "the chat template takes too long for this chat");
  }
  throw TemplateError(kServerError, "the process that renders chat templates has ended");
}

std::unique_ptr<TemplateWorker> TemplateWorkers::take_idle() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return nullptr;
  auto worker = std::move(idle_.back());
  idle_.pop_back();
  return worker;
}

std::string TemplateWorkers::start() {
  auto worker = std::make_unique<TemplateWorker>(setup_, limits_);
  auto reply = worker->reply();
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(worker));
  return reply;
}

std::string TemplateWorkers::ask(std::string_view request) {
  auto worker = take_idle();
  std::string reply;
  try {
    if (worker != nullptr) reply = worker->ask(request);
  } catch (const TemplateError& error) {
    if (error.status == 400) throw;
    worker = nullptr;  // it may have ended before this request
  }
  if (worker == nullptr) {
    worker = std::make_unique<TemplateWorker>(setup_, limits_);
    reply = worker->ask(request);
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(worker));
  return reply;
}

}  // namespace efla::serve
