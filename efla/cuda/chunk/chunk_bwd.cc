#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {
namespace {

// What is in the workspace, one after the other, in bytes; each a multiple of 256.
struct Parts {
  std::int64_t slices;
  std::size_t records, states, writes, counts;

  explicit Parts(const DeltaShape& s) : slices((s.value_dim + kChunkTokens - 1) / kChunkTokens) {
    constexpr std::size_t kTile = kChunkTokens * kChunkTokens * sizeof(bfloat16);
    const auto heads = static_cast<std::size_t>(chunk_slots(s) * s.value_heads);
    records = (heads * sizeof(ChunkRecord) + 255) / 256 * 256;
    writes = heads * static_cast<std::size_t>(slices) * kTile;
    states = writes * (s.key_dim <= 64 ? 1 : 2);
    counts = (heads + 1) * sizeof(unsigned);
  }
  std::size_t total() const { return records + 2 * states + 2 * writes + counts; }
};

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape) { return Parts(shape).total(); }

std::string chunk_bwd_refusal(const DeltaBackward<bfloat16>& p) {
  if (p.shape.key_dim > kChunkMaxKeyDim) return "keys of more than " + std::to_string(kChunkMaxKeyDim) + " dimensions";
  if (p.rule.decay == Decay::channel) return "a decay per key channel";
  if (p.saved.interval % kChunkTokens != 0) {
    return "states saved at other tokens than every " + std::to_string(kChunkTokens) + "th";
  }
  return "";
}

void chunk_bwd(const DeltaBackward<bfloat16>& p, const Workspace& workspace, cudaStream_t stream, ChunkKernel kernel) {
  constexpr const char* kOperation = "chunk_bwd";
  if (const std::string refusal = chunk_bwd_refusal(p); !refusal.empty()) {
    throw Error(kOperation, "problem", refusal, "what the chunkwise kernels take");
  }
  const Parts parts(p.shape);
  require_workspace(kOperation, workspace, parts.total());
  ChunkBackward c;
  c.p = p;
  c.forward.p.shape = p.shape;
  c.forward.p.rule = p.rule;
  c.forward.p.q = p.q;
  c.forward.p.k = p.k;
  c.forward.p.v = p.v;
  c.forward.p.beta = p.beta;
  c.forward.p.g = p.g;
  c.forward.p.cu_seqlens = p.cu_seqlens;
  c.forward.slots = chunk_slots(p.shape);
  c.forward.slots_per_sequence = p.shape.packed > 0 ? 0 : c.forward.slots / p.shape.batch;
  c.forward.scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  c.forward.q_rows = has_aligned_rows(p.q);
  c.forward.k_rows = has_aligned_rows(p.k);
  c.slices = static_cast<int>(parts.slices);
  c.dout_rows = has_aligned_rows(p.dout);
  c.dq_rows = has_aligned_rows(p.dq);
  c.dk_rows = has_aligned_rows(p.dk);
  c.v_rows = has_aligned_rows(p.v) && has_aligned_rows(p.dv);
  auto* at = static_cast<unsigned char*>(workspace.data);
  c.forward.records = reinterpret_cast<ChunkRecord*>(at);
  c.states = at + parts.records;
  c.dstates = c.states + parts.states;
  c.writes = c.dstates + parts.states;
  c.dresiduals = c.writes + parts.writes;
  c.begun = reinterpret_cast<unsigned*>(c.dresiduals + parts.writes);
  c.ready = c.begun + 1;
  const bool rows = c.forward.q_rows && c.forward.k_rows && c.v_rows && c.dout_rows && can_map_rows(p.q) &&
                    can_map_rows(p.k) && can_map_rows(p.v) && can_map_rows(p.dout);
  if (kernel == ChunkKernel::automatic) kernel = is_hopper() ? ChunkKernel::sweep : ChunkKernel::portable;
  if (!rows || kernel == ChunkKernel::portable) {
    launch_prepare(c.forward, nullptr, stream);
    launch_sweep_states(c, stream);
    launch_sweep_reverse(c, stream);
    return launch_grads(c, stream);
  }
  check(cudaMemsetAsync(c.begun, 0, parts.counts, stream), "cudaMemsetAsync");
  const RowMaps maps{map_rows(p.q), map_rows(p.k), map_rows(p.v)};
  launch_prepare(c.forward, &maps, stream);
  const CUtensorMap dout = map_rows(p.dout);
  launch_sweeps_sm90(c, maps, dout, stream);
  if (grads_sm90_take(c)) return launch_grads_sm90(c, maps, dout, stream);
  launch_grads(c, stream);
}

}  // namespace efla::gpu
