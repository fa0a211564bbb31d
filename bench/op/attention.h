// Softmax attention over pages: prompts, and decoded tokens of long texts, beside the machine's limits.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/timing.h"
#include "efla/rule/attention.h"

namespace efla::bench {

struct AttentionCase {
  AttentionShape shape;
  bool narrow_pages = false;  // keys and values in bfloat16, otherwise float32
  std::int64_t begin = 0, tokens = 1;

  // Returns, for example, "bfloat16/d256/decode/10000" or "float32/d128/prefill/512".
  std::string name() const;
  // Returns the multiplications and additions of the scores and of the weighted sums.
  double flops() const;
  // Returns the bytes of the keys and values of all tokens.
  double bytes() const;
};

struct MeasuredAttention {
  AttentionCase of;
  Timing timing;              // of a call
  double error = 0;           // relative RMS error of the last token's outputs
  double matrix_flops = 0;    // FLOP/s of the float32 matrix product, the best sample
  double read_bandwidth = 0;  // bytes/s read by all threads, out of cache, the best sample
};

// Returns every case, in order.
std::vector<AttentionCase> attention_cases();

// Checks the last token against the float64 reference, then measures in interleaved runs with the limits. Decoded
// tokens go through texts of 256 MiB in all, one after the other, so that keys and values come from memory. Throws
// std::runtime_error if the outputs are wrong.
MeasuredAttention measure_attention(const AttentionCase& c, int rounds);

nlohmann::ordered_json to_json(const MeasuredAttention& m);
void print_attention_header();
void print_attention(const MeasuredAttention& m);

}  // namespace efla::bench
