// efla_bfloat16_products: the rate of bfloat16 products beside float32's, on processors that have them
// (docs/design/2026-11-matrix-unit.md). One thread, with all data in the first-level cache; sixteen sums in registers,
// and eight broadcasts and two loads per step, as in the kernels' tiles. AMX: four tiles of sums, and four of operands
// that are loaded again at every step.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace {

constexpr int kRows = 8, kFloats = 1024;
constexpr long kSteps = 20'000'000, kTileSteps = 2'000'000;
alignas(64) float operands[kFloats], sink[kFloats];

#define EFLA_AVX512 __attribute__((target("avx512f,avx512bf16"), noinline))
#define EFLA_AMX __attribute__((target("amx-tile,amx-bf16"), noinline))

// Returns the operands of a step: two rows of 16 floats, then eight floats to broadcast.
const float* operands_of(long step) { return operands + (step & 15) * 64; }

EFLA_AVX512 void add_float32_products() {
  __m512 sums[2 * kRows] = {};
  for (long i = 0; i < kSteps; ++i) {
    const float* p = operands_of(i);
    const __m512 b0 = _mm512_load_ps(p), b1 = _mm512_load_ps(p + 16);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const __m512 a = _mm512_set1_ps(p[32 + m]);
      sums[2 * m] = _mm512_fmadd_ps(a, b0, sums[2 * m]);
      sums[2 * m + 1] = _mm512_fmadd_ps(a, b1, sums[2 * m + 1]);
    }
  }
  for (int m = 0; m < 2 * kRows; ++m) _mm512_store_ps(sink + 16 * m, sums[m]);
}

EFLA_AVX512 void add_bfloat16_pairs() {
  __m512 sums[2 * kRows] = {};
  for (long i = 0; i < kSteps; ++i) {
    const float* p = operands_of(i);
    const auto b0 = (__m512bh)_mm512_load_ps(p), b1 = (__m512bh)_mm512_load_ps(p + 16);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const auto a = (__m512bh)_mm512_set1_ps(p[32 + m]);
      sums[2 * m] = _mm512_dpbf16_ps(sums[2 * m], a, b0);
      sums[2 * m + 1] = _mm512_dpbf16_ps(sums[2 * m + 1], a, b1);
    }
  }
  for (int m = 0; m < 2 * kRows; ++m) _mm512_store_ps(sink + 16 * m, sums[m]);
}

struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

EFLA_AMX void add_bfloat16_tiles() {
  const TileShapes shapes;
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long i = 0; i < kTileSteps; ++i) {
    _tile_loadd(4, operands, 64);
    _tile_loadd(5, operands + 256, 64);
    _tile_loadd(6, operands + 512, 64);
    _tile_loadd(7, operands + 768, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sink, 64);
  _tile_release();
}

double seconds(void (*run)()) {
  const auto start = std::chrono::steady_clock::now();
  run();
  asm volatile("" : : "r"(sink) : "memory");  // makes the compiler keep the sums
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Asks Linux for the tile registers. Returns whether the process may use them.
bool get_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx512bf16")) {
    std::fputs("efla_bfloat16_products: this processor has no AVX-512 bfloat16 products\n", stderr);
    return 2;
  }
  for (int i = 0; i < kFloats; ++i) operands[i] = 1e-3F * static_cast<float>(i % 17);
  for (int turn = 0; turn < 3; ++turn) {
    const double flops = 2.0 * kSteps * 2 * kRows * 16;
    const double fma = flops / seconds(add_float32_products), pairs = 2.0 * flops / seconds(add_bfloat16_pairs);
    std::printf("float32 %.0f GFLOP/s, pairs of bfloat16 %.0f, ratio %.2f\n", fma / 1e9, pairs / 1e9, pairs / fma);
  }
  if (!get_tiles()) {
    std::puts("no AMX");
    return 0;
  }
  std::printf("tiles of bfloat16 %.0f GFLOP/s\n",
              2.0 * kTileSteps * 4 * 16 * 16 * 32 / seconds(add_bfloat16_tiles) / 1e9);
}
