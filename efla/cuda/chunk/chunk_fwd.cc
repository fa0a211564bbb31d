// The forward by chunks: divides the workspace, chooses the kernels (`prepare` and a sweep, or the fused kernel) and
// launches them. docs/design/2026-11-cuda-forward.md explains the choice.
#include <cmath>
#include <cstdint>

#include "efla/base/error.h"
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {
namespace {

// The parts of the workspace in their order, in bytes.
struct Parts {
  std::size_t records, scaled = 0, states = 0, maps = 0, peaks = 0;

  Parts(const DeltaShape& s, const DeltaRule& rule) {
    const auto chunks = static_cast<std::size_t>(chunk_slots(s) * s.value_heads);
    records = chunks * sizeof(ChunkRecord);
    if (has_decayed_rows(rule)) scaled = chunks * scaled_rows_bytes(s);
    const std::int64_t segments = segments_of(s), heads = s.sequences() * s.value_heads;
    if (segments == 1) return;
    states = static_cast<std::size_t>(heads * (segments - 1) * s.key_dim * s.value_dim) * sizeof(float);
    states = (states + 255) / 256 * 256;
    maps = static_cast<std::size_t>(heads * (segments - 2)) * segment_map_bytes(s);
    const std::int64_t forgetting = forgetting_segments_of(s, rule);
    if (forgetting > 0)
      peaks = static_cast<std::size_t>(heads * (forgetting - 1) * ((s.value_dim + 15) / 16)) * sizeof(Peaks);
  }
  std::size_t total() const { return records + scaled + states + maps + peaks; }
};

// Returns the kernel to use on a Hopper GPU (docs/design/2026-11-cuda-forward.md).
ChunkKernel best_sweep(const DeltaShape& s, const DeltaRule& rule) {
  if (has_decayed_rows(rule) || (s.key_dim <= 64) != (s.value_dim <= 64)) return ChunkKernel::sweep;
  const std::int64_t blocks = s.sequences() * s.value_heads * ((s.value_dim + 127) / 128);
  return fills_multiprocessors(blocks) ? ChunkKernel::fused : ChunkKernel::sweep;
}

std::string wide_keys() { return "keys of more than " + std::to_string(kUndividedKeys) + " dimensions "; }

// Returns whether the copy engine can read q, k and v and write o.
template <class E>
bool can_copy_all(const DeltaForward<E>& p) {
  return can_copy_rows(p.q) && can_copy_rows(p.k) && can_copy_rows(p.v) && can_copy_rows(View<const E, 4>(p.o));
}

}  // namespace

std::string divided_keys_refusal(const DeltaShape& shape, const DeltaRule& rule) {
  const std::string keys = wide_keys();
  if (rule.decay == Decay::channel) return keys + "with a decay per key channel";
  if (rule.two_keys) return keys + "with two keys";
  if (shape.key_dim % 8 != 0 || shape.value_dim % 8 != 0) return keys + "where K or V is not a multiple of 8";
  return is_hopper() ? "" : keys + "on GPUs other than Hopper";
}

template <class E>
ChunkProblem<E> chunk_problem(const DeltaForward<E>& p) {
  ChunkProblem<E> c;
  c.p = p;
  c.slots = chunk_slots(p.shape);
  c.slots_per_sequence = p.shape.packed > 0 ? 0 : c.slots / p.shape.batch;
  c.scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  c.q_rows = has_aligned_rows(p.q);
  c.k_rows = has_aligned_rows(p.k);
  c.v_rows = has_aligned_rows(p.v);
  c.o_rows = has_aligned_rows(p.o);
  c.g_rows = p.rule.decay == Decay::channel && has_aligned_rows(p.g);
  c.erase_rows = has_aligned_rows(p.erase_key);
  return c;
}
template ChunkProblem<bfloat16> chunk_problem(const DeltaForward<bfloat16>&);
template ChunkProblem<float16> chunk_problem(const DeltaForward<float16>&);

std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule) {
  return Parts(shape, rule).total();
}

template <class E>
std::string chunk_fwd_refusal(const DeltaForward<E>& p) {
  if (p.shape.key_dim > kChunkMaxKeyDim) return "keys of more than " + std::to_string(kChunkMaxKeyDim) + " dimensions";
  if (divides_keys(p.shape)) {
    if (const std::string refusal = divided_keys_refusal(p.shape, p.rule); !refusal.empty()) return refusal;
    if (p.q && !can_copy_all(p)) return wide_keys() + "in rows that are not aligned to 16 bytes";
  }
  if (p.chunk_states && p.saved.interval % kChunkTokens != 0) {
    return "states saved at other tokens than every " + std::to_string(kChunkTokens) + "th";
  }
  return "";
}

template <class E>
void chunk_fwd(const DeltaForward<E>& p, const Workspace& workspace, cudaStream_t stream, ChunkKernel kernel) {
  constexpr const char* kOperation = "chunk_fwd";
  if (const std::string refusal = chunk_fwd_refusal(p); !refusal.empty()) {
    throw Error(kOperation, "problem", refusal, "what the chunkwise kernels take");
  }
  const Parts parts(p.shape, p.rule);
  require_workspace(kOperation, workspace, parts.total());
  ChunkProblem<E> c = chunk_problem(p);
  c.records = static_cast<ChunkRecord*>(workspace.data);
  c.scaled = static_cast<unsigned char*>(workspace.data) + parts.records;
  auto* states = c.scaled + parts.scaled;
  c.segments = segments_of(p.shape);
  const std::int64_t n = p.shape.sequences(), heads = p.shape.value_heads, keys = p.shape.key_dim;
  c.segment_states = View<float, 4>::contiguous(reinterpret_cast<float*>(states),
                                                {n, heads * (c.segments - 1), keys, p.shape.value_dim});
  c.segment_maps = states + parts.states;
  c.forgetting_segments = forgetting_segments_of(p.shape, p.rule);
  c.peaks = reinterpret_cast<Peaks*>(c.segment_maps + parts.maps);
  if (!can_copy_all(p)) kernel = ChunkKernel::portable;
  if (divides_keys(p.shape)) kernel = ChunkKernel::sweep;
  if (kernel == ChunkKernel::automatic) kernel = is_hopper() ? best_sweep(p.shape, p.rule) : ChunkKernel::portable;
  const bool scaled = has_decayed_rows(p.rule), fused = kernel == ChunkKernel::fused && !scaled;
  if (scaled) launch_prepare_channel(c, stream);
  if (kernel == ChunkKernel::portable) {
    if (!scaled) launch_prepare(c, nullptr, stream);
    return launch_sweep_portable(c, stream);
  }
  const RowMaps maps{map_rows(p.q), map_rows(p.k), map_rows(p.v)};
  if (!fused && !scaled) launch_prepare(c, &maps, stream);
  launch_sweep_sm90(c, maps, map_rows(View<const E, 4>(p.o)), fused, stream);
}

template std::string chunk_fwd_refusal(const DeltaForward<bfloat16>&);
template std::string chunk_fwd_refusal(const DeltaForward<float16>&);
template void chunk_fwd(const DeltaForward<bfloat16>&, const Workspace&, cudaStream_t, ChunkKernel);
template void chunk_fwd(const DeltaForward<float16>&, const Workspace&, cudaStream_t, ChunkKernel);

}  // namespace efla::gpu
