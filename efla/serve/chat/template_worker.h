// A process that renders chat templates with Python's jinja2, apart from the server (template_worker.py).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/chat/chat_template.h"

namespace efla::serve {

struct WorkerLimits {
  std::chrono::milliseconds time{200};          // of a processor per request, and once more per MiB of the request
  std::chrono::milliseconds wall_time{10'000};  // for the start, and for a reply beyond ten times `time`
  std::size_t memory = std::size_t{1} << 30;    // bytes of addresses
};

// Python does not start.
struct NoPython : TemplateError {
  NoPython() : TemplateError(500, "python3 does not start, which renders chat templates") {}
};

// A process, and the socket to it. The process ends with its object, and with the server's own process, because it
// reads from the socket or is bounded in time. It inherits no other descriptor.
class TemplateWorker {
 public:
  // Starts a process and waits for its reply to `setup`, which reply() returns. Throws NoPython, and what ask() throws.
  TemplateWorker(std::string_view setup, const WorkerLimits& limits);
  ~TemplateWorker();
  TemplateWorker(const TemplateWorker&) = delete;
  TemplateWorker& operator=(const TemplateWorker&) = delete;

  const std::string& reply() const { return reply_; }

  // Sends a request, and returns the reply. Throws TemplateError where the process ends or takes too long; then it is
  // not to be used again.
  std::string ask(std::string_view request);

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  // Return whether the socket takes a text, or gives `into.size()` bytes, before the deadline.
  bool send_all(std::string_view text, Deadline deadline) const;
  bool receive_all(std::span<char> into, Deadline deadline) const;
  // Ends the process and throws TemplateError that says why there is no reply.
  [[noreturn]] void fail(bool late);
  // Waits for the end of the process, so that no zombie stays. Returns the status.
  int wait();
  // Ends the process, if it has not ended.
  void end();

  WorkerLimits limits_;
  std::mutex mutex_;
  pid_t process_ = -1;  // guarded by the mutex while wait() runs; −1: it has ended
  std::future<int> ended_;
  int socket_ = -1;
  int status_ = 0;  // of the process that has ended
  std::string reply_;
};

// Processes that several threads share: each request takes an idle one, or starts one.
class TemplateWorkers {
 public:
  TemplateWorkers(std::string setup, const WorkerLimits& limits) : setup_(std::move(setup)), limits_(limits) {}

  // Returns the first process's reply to `setup`. Throws TemplateError.
  std::string start();
  // Returns the reply to a request. Throws TemplateError.
  std::string ask(std::string_view request);

 private:
  std::unique_ptr<TemplateWorker> take_idle();

  const std::string setup_;
  const WorkerLimits limits_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<TemplateWorker>> idle_;
};

// Returns the program of the process, in Python.
std::string_view template_worker_program();

}  // namespace efla::serve
