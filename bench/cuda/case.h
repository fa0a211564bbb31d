// The sizes and rules at which the chunk kernels are timed, their inputs, and the functions that time them.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "bench/cuda/suite.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::bench::cuda {

// The sizes of a case; packed is the number of packed sequences, or 0. The names are B x T x H (/ HV).
struct Row {
  std::string name;
  std::int64_t batch, tokens, heads, value_heads, packed;
};
inline const Row kRows[] = {
    {"1x8192x16", 1, 8192, 16, 16, 0},           {"16x2048x8", 16, 2048, 8, 8, 0},
    {"1x8192x96", 1, 8192, 96, 96, 0},           {"1x32768x16", 1, 32768, 16, 16, 0},
    {"1x8192x16/64", 1, 8192, 16, 64, 0},        {"1x2048x16", 1, 2048, 16, 16, 0},
    {"packed 8x1024x16/64", 1, 8192, 16, 64, 8}, {"packed 8x1024x16", 1, 8192, 16, 16, 8},
};

// Tokens between the states that chunks save in training (kSavedByCudaChunks in efla/ops/delta.cc).
template <class T = bfloat16>
inline constexpr std::int64_t kTrainingInterval = sizeof(T) == 2 ? 1024 : 256;

// Scales rows of `dim` elements to the length 1.
template <class T>
void normalise(std::vector<T>& values, std::int64_t dim) {
  for (std::size_t row = 0; row < values.size(); row += dim) {
    float sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) sum += to_float(values[row + i]) * to_float(values[row + i]);
    for (std::int64_t i = 0; i < dim; ++i) values[row + i] = from_state<T>(to_float(values[row + i]) / std::sqrt(sum));
  }
}

// A rule that is timed, with its name in the results.
struct Rule {
  const char* name;
  DeltaRule rule;
  float gate = 1.0F / 16;  // g = −gate · softplus of a random number
};

// Returns the rules that are timed.
inline std::vector<Rule> rules() {
  DeltaRule deltanet, efla, gdn, kda;
  deltanet.step = parse_step_size("euler");
  deltanet.qk_l2norm = true;
  efla.step = parse_step_size("exact");
  gdn.step = parse_step_size("euler");
  gdn.decay = Decay::scalar;
  kda.step = parse_step_size("euler");
  kda.decay = Decay::channel;
  DeltaRule efla_two_keys = efla, gdn_two_keys = gdn, kda_two_keys = kda;
  for (DeltaRule* rule : {&efla_two_keys, &gdn_two_keys, &kda_two_keys}) rule->two_keys = true;
  return {{"deltanet l2norm", deltanet},
          {"efla", efla},
          {"gdn", gdn},
          {"gdn weak", gdn, 1.0F / 1024},
          {"kda", kda},
          {"kda strong", kda, 3},
          {"two keys efla", efla_two_keys},
          {"two keys gdn", gdn_two_keys},
          {"two keys kda", kda_two_keys}};
}

// Returns gates for `heads` pairs of a token and a head, one each or one per key channel; none without a decay.
inline std::vector<float> random_gates(std::size_t heads, std::int64_t key_dim, const Rule& rule) {
  std::vector<float> gates;
  if (rule.rule.decay == Decay::none) return gates;
  for (const auto e : random_values(rule.rule.decay == Decay::channel ? heads * key_dim : heads, 5)) {
    gates.push_back(-std::log1p(std::exp(-to_float(e))) * rule.gate);
  }
  return gates;
}

// Returns erase keys, keys times random numbers between 0 and 1; none for a rule with one key.
template <class T>
std::vector<T> random_erase_keys(const std::vector<T>& keys, const Rule& rule) {
  std::vector<T> erase_keys;
  if (!rule.rule.two_keys) return erase_keys;
  const auto gates = random_values<T>(keys.size(), 8);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    erase_keys.push_back(from_state<T>(to_float(keys[i]) / (1 + std::exp(-to_float(gates[i])))));
  }
  return erase_keys;
}

// Memory on the device; none if bytes is 0.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  gpu::Workspace workspace() const { return {data_, bytes_}; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// The random inputs of a case, on the host and on the device.
template <class T = bfloat16>
struct Case {
  DeltaShape shape;
  Both<T> q, k, v, beta, o;
  Both<float> g;
  Both<std::int64_t> cu_seqlens;
  Both<T> erase_key;

  Case(const Row& row, std::int64_t dim, const Rule& rule)
      : shape{row.batch, row.tokens, row.heads, row.value_heads, dim, dim, row.packed},
        q(unit_rows(shape.heads, 1)),
        k(unit_rows(shape.heads, 2)),
        v(random_values<T>(values(), 3)),
        beta(betas()),
        o(std::vector<T>(values())),
        g(random_gates(shape.batch * shape.tokens * shape.value_heads, shape.key_dim, rule)),
        cu_seqlens(ends()),
        erase_key(random_erase_keys(k.host, rule)) {}

  // Returns the problem with pointers on the device or on the host.
  DeltaForward<T> forward(const Rule& rule, bool device) {
    const std::int64_t b = shape.batch, t = shape.tokens, h = shape.heads, hv = shape.value_heads;
    const auto at = [&](auto& both) { return device ? both.device : both.host.data(); };
    DeltaForward<T> p;
    p.shape = shape;
    p.rule = rule.rule;
    p.q = View<const T, 4>::contiguous(at(q), {b, t, h, shape.key_dim});
    p.k = View<const T, 4>::contiguous(at(k), {b, t, h, shape.key_dim});
    if (rule.rule.two_keys) p.erase_key = View<const T, 4>::contiguous(at(erase_key), {b, t, h, shape.key_dim});
    p.v = View<const T, 4>::contiguous(at(v), {b, t, hv, shape.value_dim});
    p.beta = View<const T, 3>::contiguous(at(beta), {b, t, hv});
    if (!g.host.empty()) p.g = View<const float, 4>::contiguous(at(g), {b, t, hv, channels(rule)});
    if (shape.packed > 0) p.cu_seqlens = View<const std::int64_t, 1>::contiguous(at(cu_seqlens), {shape.packed + 1});
    p.o = View<T, 4>::contiguous(at(o), {b, t, hv, shape.value_dim});
    return p;
  }

 private:
  std::size_t values() const { return shape.batch * shape.tokens * shape.value_heads * shape.value_dim; }
  std::vector<T> unit_rows(std::int64_t heads, std::uint64_t stream) const {
    auto rows = random_values<T>(shape.batch * shape.tokens * heads * shape.key_dim, stream);
    normalise(rows, shape.key_dim);
    return rows;
  }
  std::vector<T> betas() const {
    auto x = random_values<T>(shape.batch * shape.tokens * shape.value_heads, 4);
    for (auto& e : x) e = from_state<T>(1 / (1 + std::exp(-to_float(e))));
    return x;
  }
  std::int64_t channels(const Rule& rule) const { return rule.rule.decay == Decay::channel ? shape.key_dim : 1; }
  std::vector<std::int64_t> ends() const {
    std::vector<std::int64_t> ends;
    for (std::int64_t n = 0; n <= shape.packed && shape.packed > 0; ++n)
      ends.push_back(n * shape.tokens / shape.packed);
    return ends;
  }
};

// The options of a run and where its results go.
struct CaseRun {
  GpuOptions options;
  std::string gpu;
  GpuWrite write;
  std::string wrong;  // names of the cases that computed wrong results

  // Writes a result. `fields` are JSON members. If `right` is false, the result says "wrong" and has no times;
  // otherwise `time` measures them.
  void write_result(const std::string& name, const std::string& fields, bool right,
                    const std::function<CallTimes()>& time);
};

// The largest relative RMS error of a right result. float16 has three bits more than bfloat16, but not an eighth of its
// error, because the inverses are merged in TF32, which has no more bits than float16.
template <class T = bfloat16>
inline constexpr double kMaxError = std::is_same_v<T, float16> ? 6e-3 / 7 : 6e-3;

// Return a relative RMS error and milliseconds as JSON.
std::string error_json(double error);
std::string milliseconds(double ms);

// Times the forward by one of the algorithms (forward.cc). `interval` is the number of tokens between saved states, or
// 0 if no states are saved. T is bfloat16 or float16 here and in time_backward.
template <class T>
void time_forward(CaseRun& run, const std::string& name, Case<T>& c, const Row& row, const Rule& rule,
                  const std::string& algorithm, std::int64_t interval);
// Times the backward alone, and forward and backward together (backward.cc).
template <class T>
void time_backward(CaseRun& run, const std::string& name, Case<T>& c, const Row& row, const Rule& rule,
                   const std::string& algorithm);
// Times the forward and the backward of float32 inputs, by chunks or by the recurrence (float32.cc). The forward saves
// states as in training.
void time_float32(CaseRun& run, const std::string& name, const Row& row, std::int64_t dim, const Rule& rule,
                  const std::string& algorithm);
// Times decode steps of `tokens` tokens (decode.cc). narrow: states in bfloat16 instead of float32.
void time_step(CaseRun& run, const std::string& name, std::int64_t batch, std::int64_t tokens, std::int64_t dim,
               const Rule& rule, bool narrow);
// Times all operators of a decode step, or a part of them (layers.cc).
void time_layers(CaseRun& run, const std::string& name, const std::string& part, std::int64_t texts);
// Times a layer around the delta rule in training: short_conv, rms_norm, rms_norm gated, add_rms_norm, glu, decay_gate.
void time_training_layer(CaseRun& run, const std::string& name, const std::string& layer, bool backward);

}  // namespace efla::bench::cuda
