// The option --device of the commands that compute.
#pragma once

#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

namespace efla::cli {

// Adds --device, whose values are auto, cpu and cuda.
void add_device_option(CLI::App& command, std::string& device);

// Returns the device that an option names, and says on standard error which GPU it is. auto is a GPU where LibTorch and
// the operators can use one, otherwise the CPU. `local_rank`: the process's number on its machine, which takes the GPU
// of this index. Throws Error that names `command` where cuda is asked for and cannot be used.
torch::Device choose_device(const std::string& command, const std::string& device, int local_rank = 0);

// Returns the device for the model of a folder, as choose_device does. A model of a family (nn/families) needs a Hopper
// GPU: with another one, auto is the CPU, and Error names `command` where cuda is asked for.
torch::Device choose_model_device(const std::string& command, const std::string& device,
                                  const std::filesystem::path& model);

}  // namespace efla::cli
