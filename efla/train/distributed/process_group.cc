#include "efla/train/distributed/process_group.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "efla/base/error.h"
#include "efla/train/distributed/process_group_c10d.h"

namespace efla::train {
namespace {

class SingleProcess : public ProcessGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::function<void()> start_sum(torch::Tensor, int) override { return nothing; }
  std::function<void()> start_broadcast(torch::Tensor, int) override { return nothing; }
  std::vector<std::vector<double>> gather(const std::vector<double>& values) override { return {values}; }
  std::string broadcast(const std::string& text, int) override { return text; }
  void shutdown() override {}
  void shutdown(const std::string&) noexcept override {}

 private:
  static void nothing() {}
};

// Returns the whole number in an environment variable.
int number(const char* name, int smallest, int largest) {
  const std::string_view text = std::getenv(name) != nullptr ? std::getenv(name) : "";
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < smallest || value > largest) {
    throw Error("train lm", name, text.empty() ? "nothing" : "'" + std::string(text) + "'",
                std::to_string(smallest) + " to " + std::to_string(largest) + " in the environment");
  }
  return value;
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

}  // namespace

RankEnvironment RankEnvironment::read() {
  RankEnvironment e;
  const bool by_torchrun = is_set("WORLD_SIZE") || is_set("RANK");
  if (!by_torchrun && !is_set("OMPI_COMM_WORLD_SIZE")) return e;
  constexpr int kMostRanks = 1 << 20;
  e.size = number(by_torchrun ? "WORLD_SIZE" : "OMPI_COMM_WORLD_SIZE", 1, kMostRanks);
  e.rank = number(by_torchrun ? "RANK" : "OMPI_COMM_WORLD_RANK", 0, e.size - 1);
  const char* local = by_torchrun ? "LOCAL_RANK" : "OMPI_COMM_WORLD_LOCAL_RANK";
  e.local_rank = is_set(local) ? number(local, 0, e.size - 1) : e.rank;
  if (e.size == 1) return e;
  if (is_set("MASTER_ADDR")) e.address = std::getenv("MASTER_ADDR");
  if (is_set("MASTER_PORT")) e.port = number("MASTER_PORT", 1, 65535);
  // mpirun sets neither MASTER_ADDR nor MASTER_PORT, and processes on one machine do not need them.
  const bool one_machine =
      is_set("OMPI_COMM_WORLD_LOCAL_SIZE") && number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks) == e.size;
  if (!is_set("MASTER_ADDR") && !one_machine) {
    throw Error("train lm", "MASTER_ADDR", "nothing", "the address of rank 0's machine in the environment");
  }
  if (is_set("TORCHELASTIC_USE_AGENT_STORE")) {
    e.launcher_has_store = std::string_view(std::getenv("TORCHELASTIC_USE_AGENT_STORE")) == "True";
    const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
    e.store_prefix = std::string("/worker/attempt_") + (attempt != nullptr ? attempt : "0");
  }
  return e;
}

std::unique_ptr<ProcessGroup> ProcessGroup::join(const RankEnvironment& environment, torch::Device device,
                                                 const nlohmann::json& description, const StopFunction& stop) {
  if (environment.size == 1) return std::make_unique<SingleProcess>();
  return join_c10d(environment, device, description, stop);
}

}  // namespace efla::train
