// The cases: an operation on one dtype and size, whose contenders are checked and then timed in interleaved runs.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/op/contenders.h"
#include "bench/timing.h"

namespace efla::bench {

struct Case {
  Operation operation = Operation::forward;
  at::ScalarType dtype = at::kFloat;
  std::int64_t dim = 128;  // K = V
  std::int64_t tokens = 2048, heads = 16;
  bool with_peers = true;
  Decay decay = Decay::none;

  // Returns "float32/d128/forward" or "float32/d128/channel/forward"; a contender's name follows after another slash.
  std::string name() const;
};

struct Result {
  std::string contender;
  std::string detail = {};               // of a peer: the variant that was timed
  std::vector<std::string> trials = {};  // of a peer: every variant tried, with its time
  std::string fault = {};                // why it has no time; "" if it has one
  double error = 0;    // relative RMS error of the worst output of the first head; of a short sequence if T is too
                       // long for the reference to hold its states
  double flops = 0;    // needed operations per token and head
  double bytes = 0;    // of state read and written per token and head; decode only
  Timing timing = {};  // of a call: all tokens and heads
  double stream_seconds = 0;  // decode: median of one core reading and writing as many bytes, from the cache or memory
};

struct Measured {
  Case of;
  std::vector<Result> results;
  double matrix_flops = 0;      // FLOP/s of the float32 matrix product, the best sample
  double stream_bandwidth = 0;  // bytes/s read and written by all threads, out of cache, the best sample
};

// Returns "float32/d128/forward/chunk" and so on, in the order of measurement.
std::vector<std::string> contender_names(const Case& c);

// Measures the contenders of a case whose full name contains `filter`; results is empty if none does.
Measured measure(const Case& c, const std::string& filter, int rounds);

// Returns every case of a full run, in order.
std::vector<Case> cases(std::int64_t tokens, std::int64_t heads);

// Returns the cases of growing T, from 1,024 to 131,072, without the peers.
std::vector<Case> scaling_cases(std::int64_t heads);

}  // namespace efla::bench
