// The kernels of chunk_fwd.cc for rules with two keys (keys.h).
#define EFLA_TWO_KEYS
#include "efla/cpu/delta/chunk_fwd.cc"
