// The kernels of chunk_bwd.cc for rules with two keys (keys.h).
#define EFLA_TWO_KEYS
#include "efla/cpu/delta/chunk_bwd.cc"
