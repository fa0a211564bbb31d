#include "bench/op_times.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>

namespace efla::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Call : at::ObserverContext {
  Clock::time_point start;
  double inner = 0.0;  // seconds of the operators that it calls
  Call* caller = nullptr;
};

thread_local Call* innermost_call = nullptr;

// LibTorch calls plain functions, so their results are global. Only one profile at a time.
std::mutex op_seconds_mutex;
std::map<std::string, double> op_seconds;

std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction&) {
  auto call = std::make_unique<Call>();
  call->caller = innermost_call;
  innermost_call = call.get();
  call->start = Clock::now();
  return call;
}

void end_call(const at::RecordFunction& function, at::ObserverContext* context) {
  auto& call = *static_cast<Call*>(context);
  const double seconds = std::chrono::duration<double>(Clock::now() - call.start).count();
  innermost_call = call.caller;
  if (call.caller) call.caller->inner += seconds;
  const std::lock_guard lock(op_seconds_mutex);
  op_seconds[function.name()] += seconds - call.inner;
}

bool holds(const std::string& text, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return text.find(part) != std::string::npos; });
}

}  // namespace

std::vector<std::pair<std::string, double>> op_times(const std::function<void()>& run) {
  op_seconds.clear();
  struct Recording {
    at::CallbackHandle handle = at::addGlobalCallback(at::RecordFunctionCallback(begin_call, end_call));
    ~Recording() { at::removeCallback(handle); }
  };
  {
    const Recording recording;
    run();
  }
  std::vector<std::pair<std::string, double>> sorted(op_seconds.begin(), op_seconds.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return sorted;
}

std::string part_of(const std::string& op) {
  if (holds(op, {"efla::linear", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::addmv"})) {
    return "matrix products";
  }
  if (holds(op, {"delta_rule", "DeltaRule"})) return "delta rule";
  if (holds(op, {"short_conv", "ShortConv"})) return "short convolution";
  if (holds(op, {"rms_norm", "RmsNorm"})) return "RMS norms";
  return "element by element, sums, copies";
}

}  // namespace efla::bench
