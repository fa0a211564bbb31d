// ProcessGroup over c10d: Gloo between CPUs, NCCL between GPUs.
#pragma once

#include <memory>

#include "efla/train/distributed/process_group.h"

namespace efla::train {

// Joins as ProcessGroup::join does, for two ranks or more.
std::unique_ptr<ProcessGroup> join_c10d(const RankEnvironment& environment, torch::Device device,
                                        const nlohmann::json& description, const StopFunction& stop);

}  // namespace efla::train
