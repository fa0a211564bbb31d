// ggml's gated_delta_net, a token recurrence on the CPU, as a peer. Only built with -DEFLA_BENCH_GGML.
#pragma once

#include <string>

#include "bench/op/contenders.h"

namespace efla::bench {

// Returns, for example, "0.21.0, commit d99724f2".
std::string ggml_version_text();

// ggml computes Euler steps. It gets α of the exact step as β, computed outside of the time, so that its results are
// comparable. Float32 only, K = V, H = HV. A decode step reads one state and writes another, without the copy that the
// next token needs.
Contender ggml_forward(const Inputs& inputs, int threads);
Contender ggml_step(const Inputs& inputs, int threads);

}  // namespace efla::bench
