// Makes tensor maps (tensor_map.h) with the function of the driver.
#include "efla/cuda/common/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

// Returns the stride of dimension h (i = 0), t (1) or b (2) in bytes. A dimension of one element may have any stride.
template <class E>
std::int64_t stride_bytes(const View<const E, 4>& view, int i) {
  const int d = 2 - i;
  return view.extent[d] == 1 ? 16 : view.stride[d] * static_cast<std::int64_t>(sizeof(E));
}

// Returns the driver's function, which the runtime finds, so that nothing links to the driver. Throws
// std::runtime_error if the driver does not have it.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
#else
  check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
        "cudaGetDriverEntryPoint");
#endif
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

template <class E>
bool can_map_rows(const View<const E, 4>& view) {
  for (int i = 0; i < 3; ++i) {
    const std::int64_t bytes = stride_bytes(view, i);
    if (bytes <= 0 || bytes >= std::int64_t{1} << 40 || view.extent[i] >= std::int64_t{1} << 31) return false;
  }
  return true;
}

template <class E>
bool can_copy_rows(const View<const E, 4>& view) {
  return has_aligned_rows(view) && can_map_rows(view);
}

template <class E>
CUtensorMap map_rows(const View<const E, 4>& view) {
  constexpr CUtensorMapDataType kType =
      std::is_same_v<E, bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  cuuint64_t extents[4], strides[3];
  const cuuint32_t box[4] = {64, 1, kRowsPerTile, 1}, steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) extents[i] = static_cast<cuuint64_t>(view.extent[3 - i]);
  for (int i = 0; i < 3; ++i) strides[i] = static_cast<cuuint64_t>(stride_bytes(view, i));
  CUtensorMap map;
  const CUresult code =
      encode(&map, kType, 4, const_cast<E*>(view.data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw CudaError("cuTensorMapEncodeTiled", cudaErrorInvalidValue);
  return map;
}

template bool can_map_rows(const View<const bfloat16, 4>&);
template bool can_copy_rows(const View<const bfloat16, 4>&);
template CUtensorMap map_rows(const View<const bfloat16, 4>&);
template bool can_map_rows(const View<const float16, 4>&);
template bool can_copy_rows(const View<const float16, 4>&);
template CUtensorMap map_rows(const View<const float16, 4>&);

}  // namespace efla::gpu
