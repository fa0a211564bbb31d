// The processes that train one model together ("ranks"), and what they say to each other: over c10d, with Gloo between
// CPUs and NCCL between GPUs.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "efla/train/stop.h"

namespace efla::train {

// Another rank is gone, or said that it stops; the message has its number.
class RankLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or mpirun (OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK) put in the
// environment, with MASTER_ADDR and MASTER_PORT. Without any of them: one process.
struct RankEnvironment {
  int rank = 0, size = 1, local_rank = 0;
  std::string address = "127.0.0.1";
  int port = 29500;
  bool launcher_has_store = false;  // torchrun's agent listens at the address already
  std::string store_prefix;         // of this attempt of torchrun's

  // Throws Error naming the variable.
  static RankEnvironment read();
};

// Every rank calls the same functions in the same order; each call but the asynchronous ones returns when the rank's
// part in it is done. All throw RankLost, within seconds, when another rank is gone.
class Ranks {
 public:
  // Waits until all ranks have come, at most five minutes, and have compared what they are about to do: where
  // `description` is not that of rank 0, every rank throws Error with the first key that differs and the lowest rank
  // where it does. Throws Error where this LibTorch has no c10d for the device, and Stopped as soon as `stop` says so
  // (asked until all have joined, not afterwards: a run is stopped by all ranks after the same step).
  static std::unique_ptr<Ranks> join(const RankEnvironment& environment, torch::Device device,
                                     const nlohmann::json& description = {}, const StopFunction& stop = {});

  virtual ~Ranks() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts to replace the tensor of rank `to` by the sum over all ranks, in a fixed order; that of the others is lost.
  // The function returned waits for the end.
  virtual std::function<void()> start_sum(torch::Tensor tensor, int to) = 0;
  // Starts to replace the tensor by that of rank `from`.
  virtual std::function<void()> start_broadcast(torch::Tensor tensor, int from) = 0;
  // Every rank's values, in the order of the ranks.
  virtual std::vector<std::vector<double>> gather(const std::vector<double>& values) = 0;

  // Returns the text of rank `from`.
  virtual std::string broadcast(const std::string& text, int from) = 0;

  // To be called last: with all the others, where training ended well; and where this rank stops alone, with the
  // reason, which the others get to know.
  virtual void leave() = 0;
  virtual void leave(const std::string& reason) noexcept = 0;
};

}  // namespace efla::train
