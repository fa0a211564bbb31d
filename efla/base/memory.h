// The memory that the process may use.
#pragma once

#include <filesystem>

namespace efla {

// Returns the memory that the process may use, in bytes: the memory of the machine, or the limit of the process's
// control group (cgroup v2), as a container has one, if the limit is lower.
double usable_memory_bytes();

// Returns the lowest limit (memory.max) of a control group and of the groups that contain it, in bytes, or infinity.
// `group` is an absolute path below the folder `root`, in which all groups are mounted.
double group_memory_bytes(const std::filesystem::path& root, const std::filesystem::path& group);

// Throws Error(operation, argument) if usable_memory_bytes() is less than `bytes`, which `what` needs. Without this
// check the system kills the program, but only after memory is full.
void require_memory(const char* operation, const char* argument, const char* what, double bytes);

}  // namespace efla
