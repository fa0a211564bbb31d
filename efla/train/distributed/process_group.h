// The processes that train one model together ("ranks") and their collective operations, over c10d: Gloo between CPUs,
// NCCL between GPUs.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "efla/base/stop.h"

namespace efla::train {

// Another rank is gone, or said that it stops; the message has its number.
class RankLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What environment variables tell a process about its rank: the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or
// mpirun (OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK), and MASTER_ADDR and MASTER_PORT. Without them there is one
// process.
struct RankEnvironment {
  int rank = 0, size = 1, local_rank = 0;
  std::string address = "127.0.0.1";
  int port = 29500;
  bool launcher_has_store = false;  // torchrun's agent listens at the address already
  std::string store_prefix;         // of the keys of torchrun's current attempt

  // Throws Error naming the variable.
  static RankEnvironment read();
};

// Every rank calls the same functions in the same order; each call but the asynchronous ones returns when the rank's
// part in it is done. All throw RankLost, within seconds, when another rank is gone.
class ProcessGroup {
 public:
  // Waits until all ranks have come, at most five minutes, and have compared what they are about to do: if a rank's
  // `description` differs from rank 0's, every rank throws Error with the lowest such rank and the first key that
  // differs there. Throws Error where this LibTorch has no c10d for the device, and Stopped as soon as `stop` says so
  // (asked until all have joined, not afterwards: a run is stopped by all ranks after the same step).
  static std::unique_ptr<ProcessGroup> join(const RankEnvironment& environment, torch::Device device,
                                            const nlohmann::json& description = {}, const StopFunction& stop = {});

  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts to replace the tensor of rank `to` by the sum over all ranks, in a fixed order. The tensors of the other
  // ranks are overwritten. The function returned waits for the end.
  virtual std::function<void()> start_sum(torch::Tensor tensor, int to) = 0;
  // Starts to replace the tensor by the tensor of rank `from`.
  virtual std::function<void()> start_broadcast(torch::Tensor tensor, int from) = 0;
  // Returns every rank's values, in the order of the ranks.
  virtual std::vector<std::vector<double>> gather(const std::vector<double>& values) = 0;

  // Returns the text of rank `from`.
  virtual std::string broadcast(const std::string& text, int from) = 0;

  // Ends the work of the group: called by all ranks where training ended well, or by one rank that stops alone, with
  // the reason that the other ranks report.
  virtual void shutdown() = 0;
  virtual void shutdown(const std::string& reason) noexcept = 0;
};

}  // namespace efla::train
