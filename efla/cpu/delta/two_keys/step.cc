// The kernels of step.cc for rules with two keys (keys.h).
#define EFLA_TWO_KEYS
#include "efla/cpu/delta/step.cc"
