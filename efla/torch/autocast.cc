#include "efla/torch/autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/version.h>

namespace efla::libtorch {
namespace {

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
void set_autocast(bool enabled) {
  at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCUDA, enabled);
}
bool is_on() { return at::autocast::is_autocast_enabled(at::kCUDA); }
at::ScalarType type() { return at::autocast::get_autocast_dtype(at::kCUDA); }
#else
void set_autocast(bool enabled) {
  at::autocast::set_autocast_gpu_dtype(at::kBFloat16);
  at::autocast::set_enabled(enabled);
}
bool is_on() { return at::autocast::is_enabled(); }
at::ScalarType type() { return at::autocast::get_autocast_gpu_dtype(); }
#endif

}  // namespace

Bfloat16OnGpu::Bfloat16OnGpu() { set_autocast(true); }

Bfloat16OnGpu::~Bfloat16OnGpu() {
  at::autocast::clear_cache();
  set_autocast(false);
}

at::ScalarType product_type(const at::Tensor& x) { return x.is_cuda() && is_on() ? type() : x.scalar_type(); }

}  // namespace efla::libtorch
