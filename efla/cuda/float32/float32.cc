// The chunk algorithm for float32 inputs: checks problems, divides the workspace and launches the kernels (float32.h).
#include "efla/cuda/float32/float32.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {
namespace {

// The parts of the workspace in their order, in bytes. Each is a multiple of 128.
struct Parts {
  std::int64_t slices;
  std::size_t records, vectors, states, writes;

  Parts(const DeltaShape& s, const DeltaRule& rule) : slices((s.value_dim + kFloat32Columns - 1) / kFloat32Columns) {
    const auto heads = static_cast<std::size_t>(float32_slots(s) * s.value_heads);
    records = heads * float32_record_bytes(s, rule);
    vectors = heads * sizeof(Float32Vectors);
    writes = heads * static_cast<std::size_t>(slices) * kFloat32Tokens * kFloat32Columns * sizeof(float);
    states = writes / kFloat32Tokens * static_cast<std::size_t>(float32_keys(s));
  }
  std::size_t forward() const { return records; }
  std::size_t backward() const { return records + vectors + 2 * states + 2 * writes; }
};

// Returns what both directions do not take of a problem, or "".
template <class Problem>
std::string refusal(const Problem& p) {
  const bool channel = has_decayed_rows(p.rule);
  const int bytes = channel ? kFloat32LargeBytes<true> : kFloat32LargeBytes<false>;
  const std::int64_t most = p.shape.key_dim <= 64 || has_shared_memory(bytes) ? kFloat32MaxKeyDim : 64;
  if (p.shape.key_dim <= most) return "";
  return "keys of more than " + std::to_string(most) + " dimensions in float32" +
         (channel && most < kFloat32MaxKeyDim ? " with a decay per key channel or two keys" : "");
}

// Returns what both directions do not take of a problem's saved states, or "".
template <class Problem>
std::string saved_states_refusal(const Problem& p) {
  if (p.saved.interval % kFloat32Tokens == 0) return "";
  return "states saved at other tokens than every " + std::to_string(kFloat32Tokens) + "th";
}

Float32Problem problem_of(const DeltaForward<float>& p) {
  Float32Problem c;
  c.p = p;
  c.slots = float32_slots(p.shape);
  c.slots_per_sequence = p.shape.packed > 0 ? 0 : c.slots / p.shape.batch;
  c.scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  c.q_rows = has_aligned_rows(p.q);
  c.k_rows = has_aligned_rows(p.k);
  c.erase_rows = has_aligned_rows(p.erase_key);
  c.g_rows = p.rule.decay == Decay::channel && has_aligned_rows(p.g);
  return c;
}

void launch_prepare(const Float32Problem& c, cudaStream_t stream) {
  has_decayed_rows(c.p.rule) ? launch_float32_prepare_channel(c, stream) : launch_float32_prepare(c, stream);
}

}  // namespace

std::size_t chunk_float32_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule) {
  return Parts(shape, rule).forward();
}
std::size_t chunk_float32_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule) {
  return Parts(shape, rule).backward();
}

std::string chunk_float32_fwd_refusal(const DeltaForward<float>& p) {
  if (const std::string reason = refusal(p); !reason.empty()) return reason;
  return p.chunk_states ? saved_states_refusal(p) : "";
}

std::string chunk_float32_bwd_refusal(const DeltaBackward<float>& p) {
  if (const std::string reason = refusal(p); !reason.empty()) return reason;
  return saved_states_refusal(p);
}

void chunk_float32_fwd(const DeltaForward<float>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "chunk_float32_fwd";
  if (const std::string reason = chunk_float32_fwd_refusal(p); !reason.empty()) {
    throw Error(kOperation, "problem", reason, "what the chunkwise kernels take");
  }
  require_workspace(kOperation, workspace, Parts(p.shape, p.rule).forward());
  Float32Problem c = problem_of(p);
  c.records = workspace.data;
  launch_prepare(c, stream);
  launch_float32_sweep(c, stream);
}

void chunk_float32_bwd(const DeltaBackward<float>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "chunk_float32_bwd";
  if (const std::string reason = chunk_float32_bwd_refusal(p); !reason.empty()) {
    throw Error(kOperation, "problem", reason, "what the chunkwise kernels take");
  }
  const Parts parts(p.shape, p.rule);
  require_workspace(kOperation, workspace, parts.backward());
  Float32Backward c;
  c.p = p;
  DeltaForward<float> inputs;
  copy_inputs(p, inputs);
  c.forward = problem_of(inputs);
  c.slices = static_cast<int>(parts.slices);
  c.dout_rows = has_aligned_rows(p.dout);
  auto* at = static_cast<std::byte*>(workspace.data);
  c.forward.records = at;
  c.forward.vectors = reinterpret_cast<Float32Vectors*>(at += parts.records);
  c.states = reinterpret_cast<float*>(at += parts.vectors);
  c.dstates = reinterpret_cast<float*>(at += parts.states);
  c.writes = reinterpret_cast<float*>(at += parts.states);
  c.dresiduals = reinterpret_cast<float*>(at += parts.writes);
  launch_prepare(c.forward, stream);
  launch_float32_states(c, stream);
  launch_float32_reverse(c, stream);
  has_decayed_rows(p.rule) ? launch_float32_grads_channel(c, stream) : launch_float32_grads(c, stream);
}

}  // namespace efla::gpu
