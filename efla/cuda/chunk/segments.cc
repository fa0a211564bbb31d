// The exact split of sequences for few heads.
//
// A segment of chunks maps the state before it to S ← M S + N. Where there are too few heads to fill the GPU, the sweep
// first computes the outputs of the first segment and, at once, M and N of the others (M by walking the segment's
// chunks with the identity as the state and no values), and then the outputs of the other segments at once, each from
// the state that follows from the first segment's end by the maps of the segments between.
#include "efla/cuda/chunk/chunk.h"

namespace efla::gpu {

int segments_of(const DeltaShape& s) {
  // Costs are in units of one chunk of the sweep; 7 + 2·i estimates the kernels between the sweeps. Rows of keys or
  // values that the copy engine cannot read are not cut.
  constexpr std::int64_t kMaxSegments = 8;
  const std::int64_t heads = s.sequences() * s.value_heads, chunks = chunk_slots(s) / s.sequences();
  const std::int64_t slices = (s.value_dim + 63) / 64, pairs = (s.value_dim + 127) / 128;
  if (s.key_dim % 8 != 0 || s.value_dim % 8 != 0 || divides_keys(s)) return 1;
  std::int64_t best = waves_of(heads * slices) * chunks;
  int segments = 1;
  for (int i = 3; i <= kMaxSegments; ++i) {
    const std::int64_t before = waves_of(heads * (slices + (pairs + 1) * (i - 2))),
                       after = waves_of(heads * slices * (i - 1));
    const std::int64_t cost = segment_chunks(chunks, i) * (before + after) + 7 + 2 * i;
    if (cost < best) {
      best = cost;
      segments = i;
    }
  }
  return segments;
}

}  // namespace efla::gpu
