// Ranks over c10d: Gloo between CPUs, NCCL between GPUs.
#pragma once

#include <memory>

#include "efla/train/ranks.h"

namespace efla::train {

// As Ranks::join, for two ranks or more.
std::unique_ptr<Ranks> join_c10d(const RankEnvironment& environment, torch::Device device,
                                 const nlohmann::json& description, const StopFunction& stop);

}  // namespace efla::train
