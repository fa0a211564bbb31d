// Chooses into how many segments sequences are cut where there are too few heads to fill the GPU.
//
// A segment of chunks maps the state S before it to M S + N. One launch of the sweep computes the outputs of the first
// segment and, at the same time, M and N of every segment but the first and the last: M by walking the segment's chunks
// from the identity with values of zero, N by walking them from a state of zeros. A second launch computes the outputs
// of the other segments at the same time. Each of its thread blocks first computes the state before its segment from
// the state after the first segment and the maps of the segments between. docs/design/2026-11-cuda-forward.md has the
// details.
#include <algorithm>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/heuristics.h"

namespace efla::gpu {

int segments_of(const DeltaShape& s) {
  // Costs are in units of one chunk of the sweep. `before` and `after` are the waves of the first and of the second
  // launch. Sequences are not cut if the copy engine cannot read rows of K or V elements, nor if keys are divided.
  const std::int64_t heads = s.sequences() * s.value_heads, chunks = chunk_slots(s) / s.sequences();
  const std::int64_t slices = (s.value_dim + 63) / 64, pairs = (s.value_dim + 127) / 128;
  if (s.key_dim % 8 != 0 || s.value_dim % 8 != 0 || divides_keys(s)) return 1;
  std::int64_t best = waves_of(heads * slices) * chunks;
  int segments = 1;
  for (int i = 3; i <= kMostSegments; ++i) {
    const std::int64_t before = waves_of(heads * (slices + (pairs + 1) * (i - 2))),
                       after = waves_of(heads * slices * (i - 1));
    const std::int64_t cost = segment_chunks(chunks, i) * (before + after) + segments_cost(i);
    if (cost < best) {
      best = cost;
      segments = i;
    }
  }
  return segments;
}

int forgetting_segments_of(const DeltaShape& s, const DeltaRule& rule) {
  const std::int64_t segments = segments_of(s), slices = (s.value_dim + 63) / 64;
  // With two keys a token's I − a k κᵀ may have a norm above 1 (docs/equations.md), so that decays alone bound nothing.
  if (segments == 1 || rule.decay != Decay::scalar || rule.two_keys) return 0;
  const std::int64_t blocks = slices + (segments - 2) * ((s.value_dim + 127) / 128 + (s.key_dim + 127) / 128);
  return blocks < 2 * slices ? 0 : static_cast<int>(std::min<std::int64_t>(blocks / slices, kMostSegments));
}

}  // namespace efla::gpu
