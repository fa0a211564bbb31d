// The kernels of recurrent_fwd.cc for rules with two keys (keys.h).
#define EFLA_TWO_KEYS
#include "efla/cpu/delta/recurrent_fwd.cc"
