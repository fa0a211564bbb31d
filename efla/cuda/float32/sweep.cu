// The sweep over the state in the forward (sweep.cuh).
#include "efla/cuda/common/saved_state.cuh"
#include "efla/cuda/float32/sweep.cuh"

namespace efla::gpu {
namespace {

// Writes the state before chunk `chunk` of a sequence, if the forward saves this state.
template <int kCount>
__device__ __forceinline__ void save_state(float (&s)[kCount], const DeltaForward<float>& p, const Sequence& sequence,
                                           std::int64_t i_h, std::int64_t chunk, std::int64_t column, int key,
                                           int lane) {
  const View<float, 5>& saved = p.chunk_states;
  if (!saved || chunk * kFloat32Tokens % p.saved.interval != 0) return;
  const View<float, 4> state =
      saved_state(saved, sequence.i_b, sequence.chunk(sequence.begin + chunk * kFloat32Tokens));
  write_state(s, state, 0, i_h, column, key, lane);
}

template <class Memory>
__global__ void __launch_bounds__(Memory::kThreads) sweep_kernel(const __grid_constant__ Float32Problem c, int slices) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(shared);
  constexpr int KD = Memory::kKeys;
  const DeltaForward<float>& p = c.p;
  const SweepThread at = sweep_thread<Memory>();
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x % slices) * kFloat32Columns + at.column;
  const std::int64_t i_h = blockIdx.x / slices % p.shape.value_heads, n = blockIdx.x / slices / p.shape.value_heads;
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t slot = first_slot(c, n),
                     chunks = (sequence.end - sequence.begin + kFloat32Tokens - 1) / kFloat32Tokens;
  const auto owned = [&](int tile) { return Memory::owner(tile) == at.group; };
  typename Memory::State s;
  read_state(s, p.initial_state, n, i_h, column, at.key, at.lane);
  Columns16 v;
  if (chunks > 0) read_columns(v, p.v, place_of<kFloat32Tokens>(sequence, n, 0), i_h, column, at.lane);
  for_each_chunk(
      memory.stages, chunks,
      [&](std::int64_t i, typename Memory::Stage& stage) {
        start_loads<true, Memory::kThreads>(c, place_of<kFloat32Tokens>(sequence, n, i), slot + i, i_h, stage);
      },
      [&](std::int64_t i, const typename Memory::Stage& stage) {
        const Float32Record& record = stage.record;
        save_state(s, p, sequence, i_h, i, column, at.key, at.lane);
        Columns16 e = {}, o = {}, u;
        multiply_state<KD>(e, o, s, shared_address(stage.k + at.key), shared_address(stage.q + at.key), at.lane);
        put_part(e, memory.parts[0][at.group][at.column / 16], at.lane);
        put_part(o, memory.parts[1][at.group][at.column / 16], at.lane);
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < kFloat32Tokens / 8; ++tile) {
          add_parts(e + 4 * tile, memory.parts[0], at.column / 16, tile, at.lane);
          if (owned(tile)) add_parts(o + 4 * tile, memory.parts[1], at.column / 16, tile, at.lane);
        }
        residual(e, v, record, at.lane);
        if (i + 1 < chunks) read_columns(v, p.v, place_of<kFloat32Tokens>(sequence, n, i + 1), i_h, column, at.lane);
        solve_lower(u, e, shared_address(record.solve), at.lane);
        scale_by_column(o, record.out, at.lane);
        multiply_lower(o, u, shared_address(record.p), at.lane, owned);
        write_columns(o, p.o, place_of<kFloat32Tokens>(sequence, n, i), i_h, column, at.lane, owned);
        scale_by_column(u, record.write, at.lane);
        decay_state(s, stage, at.key, at.lane);
        add_to_state<KD>(s, u, shared_address(stage.written_keys() + at.key), at.lane);
      });
  write_state(s, p.final_state, n, i_h, column, at.key, at.lane);
}

}  // namespace

void launch_float32_sweep(const Float32Problem& c, cudaStream_t stream) {
  const std::int64_t slices = (c.p.shape.value_dim + kFloat32Columns - 1) / kFloat32Columns;
  launch_for(c, [&]<class Memory>(std::type_identity<Memory>) {
    launch_sweep<Memory>("chunk_float32, sweep", sweep_kernel<Memory>,
                         c.p.shape.sequences() * c.p.shape.value_heads * slices, c, stream, static_cast<int>(slices));
  });
}

}  // namespace efla::gpu
