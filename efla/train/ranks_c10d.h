// Ranks over c10d: Gloo between CPUs, NCCL between GPUs.
#pragma once

#include <memory>

#include "efla/train/ranks.h"

namespace efla::train {

std::unique_ptr<Ranks> join_c10d(const RankEnvironment& environment, torch::Device device);

}  // namespace efla::train
