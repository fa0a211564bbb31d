// ggml's gated_delta_net, a token recurrence on the CPU, as a peer: built with -DEFLA_BENCH_GGML alone.
#pragma once

#include <string>

#include "bench/contenders.h"

namespace efla::bench {

// "0.21.0, commit d99724f2".
std::string ggml_version_text();

// ggml takes Euler steps and sees α of the exact step as its β, so that it computes what the others do; α is made
// outside of the time. Float32 only, K = V, H = HV. A decode step reads one state and writes another, without the copy
// that the next token needs.
Contender ggml_forward(const Inputs& inputs, int threads);
Contender ggml_step(const Inputs& inputs, int threads);

}  // namespace efla::bench
