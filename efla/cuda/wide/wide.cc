#include "efla/cuda/wide/wide.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {
namespace {

// What is in the workspace, one after the other, in bytes; each a multiple of 128.
struct Parts {
  std::int64_t slices;
  std::size_t records, vectors, states, writes;

  explicit Parts(const DeltaShape& s) : slices((s.value_dim + kWideColumns - 1) / kWideColumns) {
    const auto heads = static_cast<std::size_t>(wide_slots(s) * s.value_heads);
    records = heads * sizeof(WideRecord);
    vectors = heads * sizeof(WideVectors);
    writes = heads * static_cast<std::size_t>(slices) * kWideTokens * kWideColumns * sizeof(float);
    states = writes / kWideTokens * kWideKeys;
  }
  std::size_t forward() const { return records; }
  std::size_t backward() const { return records + vectors + 2 * states + 2 * writes; }
};

// What both directions refuse.
template <class Problem>
std::string refusal(const Problem& p) {
  if (p.shape.key_dim > kWideMaxKeyDim) {
    return "keys of more than " + std::to_string(kWideMaxKeyDim) + " dimensions in float32";
  }
  return p.rule.decay == Decay::channel ? "a decay per key channel of float32 inputs" : "";
}

std::string interval_refusal() {
  return "states saved at other tokens than every " + std::to_string(kWideTokens) + "th";
}

template <class Problem>
WideProblem forward_of(const Problem& p) {
  WideProblem c;
  c.p.shape = p.shape;
  c.p.rule = p.rule;
  c.p.q = p.q;
  c.p.k = p.k;
  c.p.v = p.v;
  c.p.beta = p.beta;
  c.p.g = p.g;
  c.p.cu_seqlens = p.cu_seqlens;
  c.slots = wide_slots(p.shape);
  c.slots_per_sequence = p.shape.packed > 0 ? 0 : c.slots / p.shape.batch;
  c.scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  c.q_rows = has_aligned_rows(p.q);
  c.k_rows = has_aligned_rows(p.k);
  return c;
}

}  // namespace

std::size_t chunk_wide_fwd_workspace_bytes(const DeltaShape& shape) { return Parts(shape).forward(); }
std::size_t chunk_wide_bwd_workspace_bytes(const DeltaShape& shape) { return Parts(shape).backward(); }

std::string chunk_wide_fwd_refusal(const DeltaForward<float>& p) {
  if (const std::string reason = refusal(p); !reason.empty()) return reason;
  if (p.narrow_states) return "saved states in bfloat16";
  if (p.chunk_states && p.saved.interval % kWideTokens != 0) return interval_refusal();
  return "";
}

std::string chunk_wide_bwd_refusal(const DeltaBackward<float>& p) {
  if (const std::string reason = refusal(p); !reason.empty()) return reason;
  if (p.saved.interval % kWideTokens != 0) return interval_refusal();
  return "";
}

void chunk_wide_fwd(const DeltaForward<float>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "chunk_wide_fwd";
  if (const std::string reason = chunk_wide_fwd_refusal(p); !reason.empty()) {
    throw Error(kOperation, "problem", reason, "what the chunkwise kernels take");
  }
  require_workspace(kOperation, workspace, Parts(p.shape).forward());
  WideProblem c = forward_of(p);
  c.p = p;
  c.records = static_cast<WideRecord*>(workspace.data);
  launch_wide_prepare(c, stream);
  launch_wide_sweep(c, stream);
}

void chunk_wide_bwd(const DeltaBackward<float>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "chunk_wide_bwd";
  if (const std::string reason = chunk_wide_bwd_refusal(p); !reason.empty()) {
    throw Error(kOperation, "problem", reason, "what the chunkwise kernels take");
  }
  const Parts parts(p.shape);
  require_workspace(kOperation, workspace, parts.backward());
  WideBackward c;
  c.p = p;
  c.forward = forward_of(p);
  c.slices = static_cast<int>(parts.slices);
  c.dout_rows = has_aligned_rows(p.dout);
  auto* at = static_cast<std::byte*>(workspace.data);
  c.forward.records = reinterpret_cast<WideRecord*>(at);
  c.forward.vectors = reinterpret_cast<WideVectors*>(at += parts.records);
  c.states = reinterpret_cast<float*>(at += parts.vectors);
  c.dstates = reinterpret_cast<float*>(at += parts.states);
  c.writes = reinterpret_cast<float*>(at += parts.states);
  c.dresiduals = reinterpret_cast<float*>(at += parts.writes);
  launch_wide_prepare(c.forward, stream);
  launch_wide_states(c, stream);
  launch_wide_reverse(c, stream);
  launch_wide_grads(c, stream);
}

}  // namespace efla::gpu
