// The machine's memory.
#pragma once

namespace efla {

// Returns the size of the machine's memory in bytes.
double machine_memory_bytes();

// Throws Error(operation, argument) if the machine's memory is less than `bytes`, which `what` needs. Without this
// check the system kills the program, but only after memory is full.
void require_memory(const char* operation, const char* argument, const char* what, double bytes);

}  // namespace efla
