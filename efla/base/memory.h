// The machine's memory.
#pragma once

namespace efla {

// Its size in bytes.
double machine_memory_bytes();

// Throws Error(operation, argument) where `bytes` of `what` exceed it: the system would kill the program only after it
// has filled memory.
void require_memory(const char* operation, const char* argument, const char* what, double bytes);

}  // namespace efla
