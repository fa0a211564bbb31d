// The two sweeps of the backward (sweep.cuh). They compute the equations at Float32Backward (float32.h).
#include "efla/cuda/common/saved_state.cuh"
#include "efla/cuda/float32/sweep.cuh"

namespace efla::gpu {
namespace {

// Returns the index of a slot's slice in the arrays of Float32Backward.
__device__ __forceinline__ std::int64_t slice_index(const Float32Backward& c, std::int64_t slot, std::int64_t i_h,
                                                    std::int64_t slice) {
  return (slot * c.p.shape.value_heads + i_h) * c.slices + slice;
}

// Writes a warp's part of a transposed state to the image of its tile.
template <int KD, int kCount>
__device__ __forceinline__ void write_image(const float (&s)[kCount], float* image, int column, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int row = column + lane / 4 + 8 * (i % 2);
    *reinterpret_cast<float2*>(image + tile_index<KD>(row, i / 2 * 8 + 2 * (lane % 4))) =
        float2{s[2 * i], s[2 * i + 1]};
  }
}

// The forward sweep: a thread block walks from one saved state to the next and writes S and U of every chunk.
// `saved_states` and `interval_chunks` as in chunk/sweep/backward_portable.cu: saved states per sequence, 0 if
// sequences are packed, and chunks from one saved state to the next. If sequences are packed, every slot has a thread
// block, because only the device knows where saved states lie. Blocks of other slots end at once.
template <class Memory>
__global__ void __launch_bounds__(Memory::kThreads)
    states_kernel(const __grid_constant__ Float32Backward c, std::int64_t saved_states, std::int64_t interval_chunks) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(shared);
  constexpr int KD = Memory::kKeys;
  const DeltaBackward<float>& p = c.p;
  const int slice = blockIdx.x % c.slices, i_h = blockIdx.x / c.slices % static_cast<int>(p.shape.value_heads);
  std::int64_t slot = blockIdx.x / c.slices / p.shape.value_heads;
  if (saved_states > 0)
    slot = slot / saved_states * c.forward.slots_per_sequence + slot % saved_states * interval_chunks;
  const ChunkAt first = chunk_at(c.forward, slot);
  if (first.rows == 0 || (first.start - first.begin) % p.saved.interval != 0) return;
  const Sequence sequence = sequence_of(p, first.n);
  const std::int64_t before = (first.start - first.begin) / kFloat32Tokens,
                     chunks = min((first.end - first.start + kFloat32Tokens - 1) / kFloat32Tokens, interval_chunks);
  const SweepThread at = sweep_thread<Memory>();
  const std::int64_t column = slice * kFloat32Columns + at.column;
  typename Memory::State s;
#pragma unroll
  for (float& x : s) x = 0;
  const View<const float, 4> state = saved_state(p.chunk_states, first.i_b, sequence.chunk(first.start));
  for_each_of_state(s, state, 0, i_h, column, at.key, at.lane, [](float& x, const float* from) { x = *from; });
  const auto place = [&](std::int64_t i) { return place_of<kFloat32Tokens>(sequence, first.n, before + i); };
  Columns16 v;
  read_columns(v, p.v, place(0), i_h, column, at.lane);
  for_each_chunk(
      memory.stages, chunks,
      [&](std::int64_t i, typename Memory::Stage& stage) {
        start_loads<false, Memory::kThreads>(c.forward, place(i), slot + i, i_h, stage);
      },
      [&](std::int64_t i, const typename Memory::Stage& stage) {
        const Float32Record& record = stage.record;
        const std::int64_t index = slice_index(c, slot + i, i_h, slice);
        write_image<KD>(s, c.states + index * kFloat32Columns * KD + at.key, at.column, at.lane);
        Columns16 e = {}, u;
        multiply_state<KD>(e, s, shared_address(stage.k + at.key), at.lane);
        put_part(e, memory.parts[0][at.group][at.column / 16], at.lane);
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < kFloat32Tokens / 8; ++tile)
          add_parts(e + 4 * tile, memory.parts[0], at.column / 16, tile, at.lane);
        residual(e, v, record, at.lane);
        if (i + 1 < chunks) read_columns(v, p.v, place(i + 1), i_h, column, at.lane);
        solve_lower(u, e, shared_address(record.solve), at.lane);
        if (at.group == 0) write_tile(u, c.writes + index * kFloat32Columns * kFloat32Tokens, at.column, at.lane);
        scale_by_column(u, record.write, at.lane);
        decay_state(s, stage, at.key, at.lane);
        add_to_state<KD>(s, u, shared_address(stage.written_keys() + at.key), at.lane);
      });
}

// What a thread block of the reverse sweep walks. It is in shared memory, because registers are scarce.
struct ReverseWalk {
  Sequence sequence;
  std::int64_t n, slot, chunks;
  int i_h, slice;

  __device__ ChunkAt place(std::int64_t i) const { return place_of<kFloat32Tokens>(sequence, n, chunks - 1 - i); }
};

// The reverse sweep: a thread block walks a whole sequence and writes dS' and D of every chunk.
template <class Memory>
__global__ void __launch_bounds__(Memory::kThreads) reverse_kernel(const __grid_constant__ Float32Backward c) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(shared);
#pragma nv_diagnostic push
#pragma nv_diag_suppress 20054  // the members' initialisers do not run, and thread 0 writes every member
  __shared__ ReverseWalk walk;
#pragma nv_diagnostic pop
  constexpr int KD = Memory::kKeys;
  const DeltaBackward<float>& p = c.p;
  if (threadIdx.x == 0) {
    const unsigned heads = static_cast<unsigned>(p.shape.value_heads), block = blockIdx.x / c.slices;
    walk.slice = static_cast<int>(blockIdx.x % c.slices);
    walk.i_h = static_cast<int>(block % heads);
    walk.n = block / heads;
    walk.sequence = sequence_of(p, walk.n);
    walk.slot = first_slot(c.forward, walk.n);
    walk.chunks = (walk.sequence.end - walk.sequence.begin + kFloat32Tokens - 1) / kFloat32Tokens;
  }
  __syncthreads();
  const SweepThread at = sweep_thread<Memory>();
  const auto column = [&] { return walk.slice * kFloat32Columns + at.column; };
  typename Memory::State ds;
  read_state(ds, p.dfinal_state, walk.n, walk.i_h, column(), at.key, at.lane);
  Columns16 dout;
  if (walk.chunks > 0) read_columns(dout, p.dout, walk.place(0), walk.i_h, column(), at.lane);
  for_each_chunk(
      memory.stages, walk.chunks,
      [&](std::int64_t i, typename Memory::Stage& stage) {
        start_loads<true, Memory::kThreads>(c.forward, walk.place(i), walk.slot + walk.chunks - 1 - i, walk.i_h, stage);
      },
      [&](std::int64_t i, const typename Memory::Stage& stage) {
        const Float32Record& record = stage.record;
        const auto index = [&] { return slice_index(c, walk.slot + walk.chunks - 1 - i, walk.i_h, walk.slice); };
        write_image<KD>(ds, c.dstates + index() * kFloat32Columns * KD + at.key, at.column, at.lane);
        Columns16 du = {}, d;
        multiply_state<KD>(du, ds, shared_address(stage.written_keys() + at.key), at.lane);
        scale_by_column(du, record.write, at.lane);
        multiply_upper(du, dout, shared_address(record.p), at.lane,
                       [&](int tile) { return Memory::owner(tile) == at.group; });
        put_part(du, memory.parts[0][at.group][at.column / 16], at.lane);
        const auto add_outputs = [&] {
          decay_state(ds, stage, at.key, at.lane);
          scale_by_column(dout, record.out, at.lane);
          add_to_state<KD>(ds, dout, shared_address(stage.q + at.key), at.lane);
        };
        const auto read_next = [&] {
          if (i + 1 < walk.chunks) read_columns(dout, p.dout, walk.place(i + 1), walk.i_h, column(), at.lane);
        };
        // Whether products of dO run while the groups exchange parts. With gates per key channel registers do not
        // suffice.
        constexpr bool kBesideExchange = !Memory::kChannelGates;
        if constexpr (kBesideExchange) add_outputs();
        __syncthreads();
        if constexpr (kBesideExchange) read_next();
#pragma unroll
        for (int tile = 0; tile < kFloat32Tokens / 8; ++tile)
          add_parts(du + 4 * tile, memory.parts[0], at.column / 16, tile, at.lane);
        solve_upper<Memory::kChannelGates>(d, du, shared_address(record.solve), at.lane);
        if (at.group == 0) write_tile(d, c.dresiduals + index() * kFloat32Columns * kFloat32Tokens, at.column, at.lane);
        if constexpr (!kBesideExchange) {
          add_outputs();
          read_next();
        }
        scale_by_column(d, record.read, at.lane);
#pragma unroll
        for (float& x : d) x = -x;
        add_to_state<KD>(ds, d, shared_address(stage.k + at.key), at.lane);
      });
  write_state(ds, p.dinitial_state, walk.n, walk.i_h, column(), at.key, at.lane);
}

}  // namespace

void launch_float32_states(const Float32Backward& c, cudaStream_t stream) {
  const std::int64_t chunks = c.p.saved.interval / kFloat32Tokens;
  const std::int64_t saved_states = c.p.shape.packed > 0 ? 0 : (c.forward.slots_per_sequence + chunks - 1) / chunks;
  const std::int64_t starts = saved_states > 0 ? saved_states * c.p.shape.batch : c.forward.slots;
  launch_for(c.forward, [&]<class Memory>(std::type_identity<Memory>) {
    launch_sweep<Memory>("chunk_float32, states", states_kernel<Memory>, starts * c.p.shape.value_heads * c.slices, c,
                         stream, saved_states, chunks);
  });
}

void launch_float32_reverse(const Float32Backward& c, cudaStream_t stream) {
  launch_for(c.forward, [&]<class Memory>(std::type_identity<Memory>) {
    launch_sweep<Memory>("chunk_float32, reverse", reverse_kernel<Memory>,
                         c.p.shape.sequences() * c.p.shape.value_heads * c.slices, c, stream);
  });
}

}  // namespace efla::gpu
