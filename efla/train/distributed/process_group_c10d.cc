#include "efla/train/distributed/process_group_c10d.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "efla/base/error.h"
#include "efla/io/json.h"
#include "efla/train/distributed/heartbeat.h"

// LibTorch's header for Gloo includes headers of Gloo, which LibTorch does not always bring along. The same holds for
// NCCL.
#if defined(USE_C10D_GLOO) && __has_include(<gloo/algorithm.h>)
#define EFLA_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>)
#define EFLA_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace efla::train {
namespace {

#if TORCH_VERSION_MAJOR >= 2
using Backend = c10d::Backend;
#else
using Backend = c10d::ProcessGroup;
#endif
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

// Longer than any rank keeps the others waiting, for example by a slow disk. Heartbeat finds lost ranks.
constexpr auto kTimeout = std::chrono::hours(24);
// A launcher's store answers at once if it speaks this LibTorch's protocol.
constexpr auto kAnswer = std::chrono::seconds(10);
// After this time c10d gives up connecting.
constexpr auto kConnect = std::chrono::minutes(5);

// Returns make(), which runs on a thread of its own because its waiting cannot be interrupted. Calls check meanwhile;
// an exception of check leaves that thread behind.
template <class Make>
auto make_watched(const Make& make, const std::function<void()>& check) {
  std::packaged_task<decltype(make())()> task(make);
  auto result = task.get_future();
  std::thread thread(std::move(task));
  try {
    while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) check();
    check();  // a signal may be what ended make()
  } catch (...) {
    thread.detach();
    throw;
  }
  thread.join();
  return result.get();
}

StorePointer connect(const RankEnvironment& environment, bool listen) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.port);
  options.isServer = listen;
  options.numWorkers = environment.size;
  options.waitWorkers = false;  // Heartbeat waits for the ranks, and knows who is missing
  StorePointer store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(environment.address, options);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    throw std::runtime_error("rank " + std::to_string(environment.rank) + " cannot " + (listen ? "listen" : "connect") +
                             " at " + environment.address + ":" + std::to_string(environment.port) + ": " +
                             what.substr(0, what.find('\n')));
  }
  if (environment.store_prefix.empty()) return store;
  return c10::make_intrusive<c10d::PrefixStore>(environment.store_prefix, store);
}

#ifdef EFLA_GLOO
c10::intrusive_ptr<Backend> make_gloo(const StorePointer& store, const RankEnvironment& environment) {
  auto options = c10d::ProcessGroupGloo::Options::create(kTimeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  const bool loopback = environment.address == "127.0.0.1" || environment.address == "localhost";
  if (interface != nullptr) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
  } else if (loopback) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  } else {
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, environment.rank, environment.size, options);
}
#endif

c10::intrusive_ptr<Backend> make_backend(const StorePointer& store, const RankEnvironment& environment,
                                         torch::Device device) {
  if (device.is_cuda()) {
#ifdef EFLA_NCCL
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, environment.rank, environment.size);
#else
    throw Error("train lm", "device", "cuda in several processes", "one process: this build has no NCCL");
#endif
  }
#ifdef EFLA_GLOO
  return make_gloo(store, environment);
#else
  throw Error("train lm", "WORLD_SIZE", std::to_string(environment.size),
              "1: this build has no Gloo (libgloo-dev was not there)");
#endif
}

class C10dProcessGroup : public ProcessGroup {
 public:
  C10dProcessGroup(const RankEnvironment& environment, torch::Device device, StopFunction stop)
      : rank_(environment.rank),
        size_(environment.size),
        device_(device),
        stop_(std::move(stop)),
        store_(reach(environment, environment.rank == 0 && !environment.launcher_has_store)),
        heartbeat_(reach(environment, false), rank_, size_, stop_),
        backend_(make_watched([=, store = store_] { return make_backend(store, environment, device); },
                              [this] { check(); })) {}

  // Does not destroy the backend without a shutdown(): its destructor waits for threads that may wait for a lost rank.
  ~C10dProcessGroup() override {
    if (!shut_down_) backend_.release();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::function<void()> start_sum(torch::Tensor tensor, int to) override {
    std::vector<torch::Tensor> tensors{std::move(tensor)};
    c10d::ReduceOptions options;
    options.rootRank = to;
    return start([&] { return backend_->reduce(tensors, options); });
  }

  std::function<void()> start_broadcast(torch::Tensor tensor, int from) override {
    std::vector<torch::Tensor> tensors{std::move(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    return start([&] { return backend_->broadcast(tensors, options); });
  }

  std::vector<std::vector<double>> gather(const std::vector<double>& values) override {
    const auto count = static_cast<std::int64_t>(values.size());
    // All but one of the numbers in a sum are 0, so the sum is exact in any order.
    torch::Tensor all = torch::zeros({size_, count}, torch::kFloat64);
    std::copy(values.begin(), values.end(), all.data_ptr<double>() + rank_ * count);
    std::vector<torch::Tensor> tensors{all.to(device_)};
    start([&] { return backend_->allreduce(tensors); })();
    all = tensors[0].to(torch::kCPU);
    std::vector<std::vector<double>> gathered;
    const double* data = all.data_ptr<double>();
    for (int r = 0; r < size_; ++r) gathered.emplace_back(data + r * count, data + (r + 1) * count);
    return gathered;
  }

  std::string broadcast(const std::string& text, int from) override {
    const auto sizes = gather({static_cast<double>(text.size())});
    std::string bytes = text;
    bytes.resize(static_cast<std::size_t>(sizes[from].front()));
    const torch::Tensor host = torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kUInt8);
    const torch::Tensor sent = host.to(device_);
    if (!bytes.empty()) start_broadcast(sent, from)();
    host.copy_(sent);
    return bytes;
  }

  void shutdown() override {
    gather({0.0});
    heartbeat_.leave("");
#if defined(EFLA_NCCL) && TORCH_VERSION_MAJOR >= 2
    if (device_.is_cuda()) static_cast<c10d::ProcessGroupNCCL&>(*backend_).shutdown();
#endif
    shut_down_ = true;
  }

  void shutdown(const std::string& reason) noexcept override { heartbeat_.leave(reason); }

  // From here on a wait ends only when all ranks have done their part, or one of them is lost.
  void wait_for_all() { stop_ = {}; }

 private:
  StorePointer reach(const RankEnvironment& environment, bool listen) const {
    const auto start = std::chrono::steady_clock::now();
    const auto answered = [=] {
      auto store = connect(environment, listen);
      store->add("efla/reached", 0);
      return store;
    };
    return make_watched(answered, [&, this] {
      stop_if_asked();
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > kConnect + kAnswer) {
        throw std::runtime_error("rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                                 " waited for five minutes; rank 0 does not answer at " + environment.address + ":" +
                                 std::to_string(environment.port));
      }
      if (environment.launcher_has_store && waited > kAnswer) {
        throw std::runtime_error(
            "the store of torchrun at " + environment.address + ":" + std::to_string(environment.port) +
            " does not answer; torchrun must belong to the PyTorch of this program, LibTorch " + TORCH_VERSION);
      }
    });
  }

  void stop_if_asked() const {
    if (stop_ && stop_()) throw Stopped();
  }

  void check() const {
    heartbeat_.check();
    stop_if_asked();
  }

  template <class Start>
  std::function<void()> start(const Start& start) {
    try {
      return [this, work = start()] { wait(*work); };
    } catch (const std::exception& error) {
      heartbeat_.find_lost(error.what());
    }
  }

  void wait(c10d::Work& work) {
    using std::chrono::microseconds;
    try {
      for (microseconds pause(20); !work.isCompleted(); pause = std::min(pause * 2, microseconds(1000))) {
        check();
        std::this_thread::sleep_for(pause);
      }
      work.wait();
    } catch (const RankLost&) {
      throw;
    } catch (const Stopped&) {
      throw;
    } catch (const std::exception& error) {
      heartbeat_.find_lost(error.what());
    }
  }

  int rank_, size_;
  torch::Device device_;
  StopFunction stop_;
  StorePointer store_;
  Heartbeat heartbeat_;
  c10::intrusive_ptr<Backend> backend_;
  bool shut_down_ = false;
};

// Throws Error on all ranks where a rank's description is not that of rank 0.
void require_same_on_all(ProcessGroup& group, const nlohmann::json& description) {
  const auto text = [](const nlohmann::json& json) {
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  const std::string mine = text(description);
  const auto difference =
      io::first_difference(nlohmann::json::parse(mine), nlohmann::json::parse(group.broadcast(mine, 0)));
  const auto differs = group.gather({difference ? 1.0 : 0.0});
  const auto rank =
      static_cast<int>(std::find(differs.begin(), differs.end(), std::vector<double>{1.0}) - differs.begin());
  if (rank == group.size()) return;
  const nlohmann::json own =
      difference ? nlohmann::json{difference->field, difference->asked, difference->found} : nlohmann::json();
  const auto first = nlohmann::json::parse(group.broadcast(text(own), rank)).get<std::vector<std::string>>();
  group.shutdown();
  throw Error("train lm", first[0], first[1] + " on rank " + std::to_string(rank), first[2] + " as on rank 0");
}

}  // namespace

std::unique_ptr<ProcessGroup> join_c10d(const RankEnvironment& environment, torch::Device device,
                                        const nlohmann::json& description, const StopFunction& stop) {
  auto group = std::make_unique<C10dProcessGroup>(environment, device, stop);
  require_same_on_all(*group, description);
  group->wait_for_all();
  return group;
}

}  // namespace efla::train
