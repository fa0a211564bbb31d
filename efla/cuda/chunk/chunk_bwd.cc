// The backward by chunks: divides the workspace, chooses between the kernels for Hopper and the portable ones, and
// launches `prepare`, two sweeps and the gradients. docs/design/2026-11-cuda-backward.md explains the kernels.
#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/common/copy_rows.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {
namespace {

// The parts of the workspace in their order, in bytes. Each is a multiple of 256.
struct Parts {
  std::int64_t slices;
  std::size_t records, scaled = 0, states, writes, key_sums = 0, counts;

  Parts(const DeltaShape& s, const DeltaRule& rule) : slices((s.value_dim + kChunkTokens - 1) / kChunkTokens) {
    constexpr std::size_t kTile = kChunkTokens * kChunkTokens * 2;
    const auto heads = static_cast<std::size_t>(chunk_slots(s) * s.value_heads);
    records = (heads * sizeof(ChunkRecord) + 255) / 256 * 256;
    const std::size_t tiles = s.key_dim <= 64 ? 1 : divides_keys(s) ? 4 : 2;
    writes = heads * static_cast<std::size_t>(slices) * kTile;
    states = writes * tiles;
    if (has_decayed_rows(rule)) {
      scaled = heads * scaled_rows_bytes(s);
    }
    if (s.group() > 1 && (has_decayed_rows(rule) || divides_keys(s))) {
      const std::size_t gradients = rule.two_keys ? 3 : 2;
      key_sums = static_cast<std::size_t>(chunk_slots(s) * s.heads) * gradients * 2 * kTile * tiles;
    }
    counts = ((1 + kClaims + heads) * sizeof(unsigned) + 255) / 256 * 256;
  }
  std::size_t total() const { return records + scaled + 2 * states + 2 * writes + key_sums + counts; }
};

// Returns whether the copy engine can read the rows of q, k, v and dO, and dv can be written in pieces of 16 bytes.
template <class E>
bool can_copy_all(const DeltaBackward<E>& p) {
  return can_copy_rows(p.q) && can_copy_rows(p.k) && can_copy_rows(p.v) && can_copy_rows(p.dout) &&
         has_aligned_rows(p.dv);
}

// Launches the kernel that writes every record. `maps` as in launch_prepare.
template <class E>
void prepare(const ChunkProblem<E>& c, const RowMaps* maps, cudaStream_t stream) {
  if (has_decayed_rows(c.p.rule)) return launch_prepare_channel(c, stream);
  launch_prepare(c, maps, stream);
}

// Calls f with every input whose rows the copy engine cannot read, if the keys are divided. Such rows are copied before
// the sweeps, because divided keys have no portable sweeps.
template <class F, class E>
void for_copied_rows(DeltaBackward<E>& p, F&& f) {
  if (!divides_keys(p.shape)) return;
  for (auto* view : {&p.q, &p.k, &p.v, &p.dout}) {
    if (!can_copy_rows(*view)) f(*view);
  }
}

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule) {
  return Parts(shape, rule).total();
}

template <class E>
std::size_t chunk_bwd_workspace_bytes(const DeltaBackward<E>& problem) {
  DeltaBackward<E> p = problem;
  std::size_t bytes = Parts(p.shape, p.rule).total();
  for_copied_rows(p, [&](const View<const E, 4>& view) { bytes += copied_bytes(view); });
  return bytes;
}

template <class E>
std::string chunk_bwd_refusal(const DeltaBackward<E>& p) {
  if (p.shape.key_dim > kChunkMaxKeyDim) return "keys of more than " + std::to_string(kChunkMaxKeyDim) + " dimensions";
  if (divides_keys(p.shape)) {
    if (const std::string refusal = divided_keys_refusal(p.shape, p.rule); !refusal.empty()) return refusal;
  }
  if (p.rule.decay == Decay::channel && !is_hopper()) return "a decay per key channel on GPUs other than Hopper";
  if (p.rule.two_keys && !is_hopper()) return "two keys on GPUs other than Hopper";
  if (p.saved.interval % kChunkTokens != 0) {
    return "states saved at other tokens than every " + std::to_string(kChunkTokens) + "th";
  }
  return "";
}

template <class E>
void chunk_bwd(const DeltaBackward<E>& problem, const Workspace& workspace, cudaStream_t stream, ChunkKernel kernel) {
  constexpr const char* kOperation = "chunk_bwd";
  if (const std::string refusal = chunk_bwd_refusal(problem); !refusal.empty()) {
    throw Error(kOperation, "problem", refusal, "what the chunkwise kernels take");
  }
  const Parts parts(problem.shape, problem.rule);
  require_workspace(kOperation, workspace, chunk_bwd_workspace_bytes(problem));
  auto* at = static_cast<unsigned char*>(workspace.data);
  DeltaBackward<E> p = problem;
  auto* copies = at + parts.total();
  for_copied_rows(p, [&](View<const E, 4>& view) {
    auto* to = copies;
    copies += copied_bytes(view);
    view = copy_rows(view, to, stream);
  });
  DeltaForward<E> inputs;
  copy_inputs(p, inputs);
  ChunkBackward<E> c;
  c.p = p;
  c.forward = chunk_problem(inputs);
  const bool scaled = has_decayed_rows(p.rule);
  c.slices = static_cast<int>(parts.slices);
  c.dout_rows = has_aligned_rows(p.dout);
  c.dq_rows = has_aligned_rows(p.dq);
  c.dk_rows = has_aligned_rows(p.dk);
  c.v_rows = has_aligned_rows(p.v) && has_aligned_rows(p.dv);
  c.forward.records = reinterpret_cast<ChunkRecord*>(at);
  c.forward.scaled = at + parts.records;
  c.states = c.forward.scaled + parts.scaled;
  c.dstates = c.states + parts.states;
  c.writes = c.dstates + parts.states;
  c.dresiduals = c.writes + parts.writes;
  c.key_sums = reinterpret_cast<float*>(c.dresiduals + parts.writes);
  c.begun = reinterpret_cast<unsigned*>(c.dresiduals + parts.writes + parts.key_sums);
  c.claims = c.begun + 1;
  c.ready = c.claims + kClaims;
  if (kernel == ChunkKernel::automatic) kernel = is_hopper() ? ChunkKernel::sweep : ChunkKernel::portable;
  if (!divides_keys(p.shape) && (!can_copy_all(p) || kernel == ChunkKernel::portable)) {
    prepare(c.forward, nullptr, stream);
    launch_sweep_states(c, stream);
    launch_sweep_reverse(c, stream);
    if (scaled) return launch_grads_channel(c, stream);
    return launch_grads(c, stream);
  }
  c.counted = true;
  check(cudaMemsetAsync(c.begun, 0, parts.counts, stream), "cudaMemsetAsync");
  const RowMaps maps{map_rows(p.q), map_rows(p.k), map_rows(p.v)};
  prepare(c.forward, &maps, stream);
  const CUtensorMap dout = map_rows(p.dout);
  launch_sweeps_sm90(c, maps, dout, stream);
  if (scaled) return launch_grads_channel(c, stream);
  if (grads_sm90_take(c)) return launch_grads_sm90(c, maps, dout, stream);
  launch_grads(c, stream);
}

template std::size_t chunk_bwd_workspace_bytes(const DeltaBackward<bfloat16>&);
template std::size_t chunk_bwd_workspace_bytes(const DeltaBackward<float16>&);
template std::string chunk_bwd_refusal(const DeltaBackward<bfloat16>&);
template std::string chunk_bwd_refusal(const DeltaBackward<float16>&);
template void chunk_bwd(const DeltaBackward<bfloat16>&, const Workspace&, cudaStream_t, ChunkKernel);
template void chunk_bwd(const DeltaBackward<float16>&, const Workspace&, cudaStream_t, ChunkKernel);

}  // namespace efla::gpu
